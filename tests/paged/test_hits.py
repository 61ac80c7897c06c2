"""What the prefix cache finds where groups of layers need different pages of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paged.groups import Windows, entries_behind
from paged.hits import find_prefix
from paged.pool import NULL_PAGE, PagePool

PAGE_SIZE = 4
HASHES = [bytes([n]) for n in range(8)]


def pool_with(*known: set[int]) -> PagePool:
    """A pool that knows, for each group, the pages of some entries."""
    pool = PagePool(100, PAGE_SIZE)
    for group, entries in enumerate(known):
        for entry in sorted(entries):
            [page] = pool.allocate(1)
            pool.register(page, HASHES[entry], group)
            pool.release([page])
    return pool


def found(windows: Windows, *known: set[int]) -> list[list[bool]]:
    """For each group, which entries of the prefix have a page."""
    tables = find_prefix(pool_with(*known), HASHES, windows)
    assert len({len(table) for table in tables}) == 1
    return [[page != NULL_PAGE for page in table] for table in tables]


def test_without_a_window_all_pages_are_needed() -> None:
    assert found((None,), {0, 1, 3}) == [[True] * 2]
    assert found((None,), {1, 2}) == [[]]


def test_a_window_needs_no_more_than_it_sees() -> None:
    """After 4 pages, a window of 9 sees 8 tokens before the next one: two pages."""
    assert found((9,), {2, 3}) == [[False, False, True, True]]
    assert found((10,), {2, 3}) == [[]]
    assert found((10,), {0, 2, 3}) == [[True]], "of what came before nothing is missing"


def test_the_longest_prefix_is_taken() -> None:
    assert found((5,), {1, 2, 4, 6}) == [[False] * 6 + [True]]


def test_all_groups_must_find_theirs() -> None:
    assert found((None, 5), {0, 1, 2}, {0, 1, 2, 3, 4}) == [[True] * 3, [False, False, True]]
    assert found((None, 5), {0, 1, 2, 3}, {0, 1, 3}) == [[True] * 4, [False, False, False, True]]
    assert found((None, 5), {0, 1, 2, 3}, {0, 1}) == [[True] * 2, [False, True]]
    assert found((9, 5), {2, 3, 4}, {2, 3}) == [[False, False, True, True], [False] * 3 + [True]]
    assert found((5, 5), {3}, {2}) == [[], []]


def test_groups_do_not_mix() -> None:
    assert found((None, None), {0, 1}, set()) == [[], []]


@given(
    windows=st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4),
    data=st.data(),
)
def test_as_trying_every_length_would(windows: list[int | None], data: st.DataObject) -> None:
    entries = st.sets(st.integers(0, len(HASHES) - 1), min_size=4)
    known = [data.draw(entries) for _ in windows]

    def usable(count: int) -> bool:
        position = count * PAGE_SIZE
        return all(
            entries >= set(range(entries_behind(window, position, PAGE_SIZE), count))
            for window, entries in zip(windows, known, strict=True)
        )

    tables = find_prefix(pool_with(*known), HASHES, tuple(windows))
    longest = max(count for count in range(len(HASHES) + 1) if usable(count))
    assert {len(table) for table in tables} == {longest}
    for window, table in zip(windows, tables, strict=True):
        behind = entries_behind(window, longest * PAGE_SIZE, PAGE_SIZE)
        assert table[:behind] == [NULL_PAGE] * behind
        assert NULL_PAGE not in table[behind:]
