"""The pool: every page free, used or cached, each transition, and random runs against a model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged.pool import NULL_PAGE, OutOfPages, PagePool, Part


def pool_of(pages: int, enable_prefix_caching: bool = True) -> PagePool:
    """A pool with this many pages besides the null page."""
    return PagePool(pages + 1, page_size=4, enable_prefix_caching=enable_prefix_caching)


def cached(pool: PagePool, *names: bytes) -> list[int]:
    """Put one page per name into the prefix cache, the first name least recently used."""
    pages = pool.allocate(len(names))
    for page, name in zip(pages, names, strict=True):
        pool.register(page, name)
        pool.release([page])
    return pages


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_used, pool.num_cached


def test_a_new_pool_is_free_except_the_null_page() -> None:
    pool = pool_of(5)
    assert counts(pool) == (5, 0, 0)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert pool._references[NULL_PAGE] == 0


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (8, 0)])
def test_a_pool_of_nothing_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages={num_pages} and page_size={page_size}"):
        PagePool(num_pages, page_size)


def test_released_pages_without_a_hash_are_free() -> None:
    pool = pool_of(4)
    pages = pool.allocate(3)
    assert counts(pool) == (1, 3, 0)
    pool.release(pages)
    assert counts(pool) == (4, 0, 0)


def test_allocation_is_all_or_nothing() -> None:
    pool = pool_of(3)
    pool.allocate(1)
    cached(pool, b"a")
    with pytest.raises(OutOfPages, match="3 pages needed, 2 available") as error:
        pool.allocate(3)
    assert (error.value.needed, error.value.available) == (3, 2)
    assert counts(pool) == (1, 1, 1)


def test_allocating_nothing_takes_nothing() -> None:
    pool = pool_of(2)
    assert pool.allocate(0) == []
    assert counts(pool) == (2, 0, 0)


def test_a_page_is_used_until_its_last_reference_goes() -> None:
    pool = pool_of(2)
    pages = pool.allocate(1)
    pool.share(pages)
    assert pool._references[pages[0]] == 2
    pool.release(pages)
    assert counts(pool) == (1, 1, 0)
    pool.release(pages)
    assert counts(pool) == (2, 0, 0)


def test_released_pages_with_a_hash_are_cached_and_revived_by_sharing() -> None:
    pool = pool_of(2)
    [page] = cached(pool, b"a")
    assert counts(pool) == (1, 0, 1)
    assert pool.match([b"a"]) == [page]
    assert counts(pool) == (1, 0, 1), "match takes no references"
    pool.share([page])
    assert counts(pool) == (1, 1, 0)
    assert pool.match([b"a"]) == [page]


def test_a_match_ends_at_the_first_unknown_hash() -> None:
    pool = pool_of(4)
    first, second, _ = cached(pool, b"a", b"b", b"d")
    assert pool.match([b"a", b"b", b"c", b"d"]) == [first, second]
    assert pool.match([b"c", b"a"]) == []
    assert pool.match([]) == []


def test_free_pages_are_taken_before_cached_ones() -> None:
    pool = pool_of(3)
    cached(pool, b"a", b"b")
    pool.allocate(1)
    assert len(pool.match([b"a", b"b"])) == 2
    assert pool.num_cached == 2


def test_the_least_recently_used_page_is_evicted_first() -> None:
    pool = pool_of(3)
    first, second, _ = cached(pool, b"a", b"b", b"c")
    pool.share([first])
    pool.release([first])  # now used last
    assert pool.allocate(1) == [second]
    assert pool.match([b"b"]) == []
    assert [len(pool.match([name])) for name in (b"a", b"c")] == [1, 1]


def test_tails_are_evicted_before_the_prefixes_they_need() -> None:
    pool = pool_of(3)
    table = pool.allocate(3)
    for page, name in zip(table, (b"a", b"ab", b"abc"), strict=True):
        pool.register(page, name)
    pool.release(table)
    pool.allocate(2)
    assert pool.match([b"a", b"ab", b"abc"]) == table[:1]


def test_the_first_page_with_a_hash_keeps_it() -> None:
    pool = pool_of(2)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.match([b"a"]) == [first]
    pool.release([first, second])
    assert counts(pool) == (1, 0, 1)


def test_what_can_be_allocated_next_to_shared_pages() -> None:
    pool = pool_of(3)
    [idle] = cached(pool, b"a")
    [used] = pool.allocate(1)
    assert pool.can_allocate(2)
    assert not pool.can_allocate(3)
    assert pool.can_allocate(2, shared=[used])
    assert not pool.can_allocate(2, shared=[idle]), "a revived page is not available any more"


def test_reset_forgets_everything_unless_a_page_is_used() -> None:
    pool = pool_of(3)
    [page] = cached(pool, b"a")
    pool.share([page])
    assert not pool.reset_prefix_cache()
    assert pool.match([b"a"]) == [page]
    pool.release([page])
    assert pool.reset_prefix_cache()
    assert counts(pool) == (3, 0, 0)
    assert pool.match([b"a"]) == []


def test_without_prefix_caching_no_hash_is_kept() -> None:
    pool = pool_of(1, enable_prefix_caching=False)
    cached(pool, b"a")
    assert counts(pool) == (1, 0, 0)
    assert pool.match([b"a"]) == []


def test_broken_bookkeeping_is_caught() -> None:
    pool = pool_of(2)
    [page] = pool.allocate(1)
    pool.register(page, b"a")
    with pytest.raises(AssertionError, match=f"page {page} already carries a hash"):
        pool.register(page, b"b")
    pool.release([page])
    with pytest.raises(AssertionError, match=f"page {page} is released more often"):
        pool.release([page])
    with pytest.raises(AssertionError, match="page 2 is free"):
        pool.share([2])
    with pytest.raises(AssertionError, match="page 2 is not used"):
        pool.register(2, b"c")


class PoolMachine(RuleBasedStateMachine):
    """Random use of a small pool next to the plainest model of it: tables, names and ages."""

    SIZE = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(self.SIZE)
        self.tables: list[list[int]] = []
        self.names: dict[int, bytes] = {}
        self.lengths: dict[int, int] = {}  # tokens of pages that are not full, of named ones
        self.idle: list[int] = []  # named pages in no table, oldest first

    def held(self) -> set[int]:
        return {page for table in self.tables for page in table}

    @rule(count=st.integers(0, SIZE + 1))
    def allocate(self, count: int) -> None:
        num_free = self.SIZE - len(self.held()) - len(self.idle)
        num_evicted = max(count - num_free, 0)
        if num_evicted > len(self.idle):
            with pytest.raises(OutOfPages):
                self.pool.allocate(count)
            return
        evicted, self.idle = self.idle[:num_evicted], self.idle[num_evicted:]
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & (self.held() | set(self.idle))
        assert set(evicted) <= set(pages)
        for page in evicted:
            del self.names[page]
        self.tables.append(pages)

    @precondition(lambda self: self.held() - self.names.keys())
    @rule(
        data=st.data(), name=st.sampled_from([b"a", b"b", b"c"]), length=st.sampled_from([0, 3, 5])
    )
    def register(self, data: st.DataObject, name: bytes, length: int) -> None:
        page = data.draw(st.sampled_from(sorted(self.held() - self.names.keys())))
        self.pool.register(page, name, part=Part(b"p", length) if length else None)
        if name not in self.names.values():
            self.names[page] = name
            self.lengths[page] = length

    @rule(name=st.sampled_from([b"a", b"b", b"c"]))
    def forget(self, name: bytes) -> None:
        self.pool.forget([name])
        self.names = {page: held for page, held in self.names.items() if held != name}
        self.idle = [page for page in self.idle if page in self.names]

    @rule(names=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3))
    def share_what_matches(self, names: list[bytes]) -> None:
        pages = self.pool.match(names)
        assert [self.names[page] for page in pages] == names[: len(pages)]
        if len(pages) < len(names):
            assert names[len(pages)] not in self.names.values()
        self.pool.share(pages)
        self.idle = [page for page in self.idle if page not in pages]
        self.tables.append(pages)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        left = [page for page in dict.fromkeys(table) if page not in self.held()]
        last_use = sorted(left, key=table.index, reverse=True)
        self.idle += [page for page in last_use if page in self.names]

    @rule()
    def reset(self) -> None:
        done = self.pool.reset_prefix_cache()
        assert done == (not self.held())
        if done:
            self.names, self.idle = {}, []

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len(self.held())
        assert self.pool.num_cached == len(self.idle)
        lengths = {self.lengths[page] for page in self.names} - {0}
        assert self.pool.part_lengths(b"p") == sorted(lengths, reverse=True)
        for page in range(1, self.SIZE + 1):
            held = sum(table.count(page) for table in self.tables)
            assert self.pool._references[page] == held
            seen = self.pool.states()[page - 1]
            assert seen == (min(held + 1, 3) if held else int(page in self.pool._cached))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
