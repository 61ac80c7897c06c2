"""The hash chain: equal exactly when salt and all tokens up to the page's end are equal."""

from hypothesis import given
from hypothesis import strategies as st

from paged.prefix import extend_hashes, page_hash, root_hash

TOKEN_IDS = st.integers(0, 2**31 - 1)


def hashes_of(tokens: list[int], page_size: int = 2, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, page_size, salt)
    return hashes


def test_only_full_pages_are_hashed() -> None:
    assert [len(hashes_of(list(range(count)), page_size=3)) for count in range(8)] == [
        0, 0, 0, 1, 1, 1, 2, 2
    ]  # fmt: skip


def test_a_hash_covers_every_token_before_it() -> None:
    first, second = hashes_of([1, 2, 3, 4]), hashes_of([9, 2, 3, 4])
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_equal_prefixes_have_equal_hashes() -> None:
    first, second = hashes_of([1, 2, 3, 4, 5, 6]), hashes_of([1, 2, 3, 4, 7, 8])
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_salts_share_nothing() -> None:
    plain, salted, other = (hashes_of([1, 2, 3, 4], salt=salt) for salt in ("", "a", "b"))
    assert len({*plain, *salted, *other}) == 6


def test_no_salt_stands_for_a_page() -> None:
    """Here salt and page are hashed over the very same bytes."""
    assert root_hash("a" * 32 + "A\0\0\0") != page_hash(b"a" * 32, [ord("A")])


def test_token_boundaries_matter() -> None:
    """Ids are hashed with a fixed width: 1, 23 is not 12, 3, and 0 is not nothing."""
    root = root_hash()
    inputs = [[1, 23], [12, 3], [0], [0, 0], [256], [1, 0]]
    assert len({page_hash(root, tokens) for tokens in inputs}) == len(inputs)


@given(st.lists(TOKEN_IDS, max_size=20), st.integers(1, 4), st.data())
def test_extending_in_parts_gives_the_same_chain(
    tokens: list[int], page_size: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tokens) // page_size)) * page_size
    hashes = hashes_of(tokens[:cut], page_size)
    extend_hashes(hashes, tokens[cut:], page_size)
    assert hashes == hashes_of(tokens, page_size)


@given(st.lists(TOKEN_IDS, max_size=8), st.lists(TOKEN_IDS, max_size=8))
def test_hashes_agree_exactly_as_far_as_the_tokens(first: list[int], second: list[int]) -> None:
    for index, (a, b) in enumerate(zip(hashes_of(first), hashes_of(second), strict=False)):
        end = (index + 1) * 2
        assert (a == b) == (first[:end] == second[:end])
