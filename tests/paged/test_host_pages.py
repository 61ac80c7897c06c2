"""Host pages behind the pool: nothing is lost that fits, and what comes back is what went."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged.hits import find_prefix
from paged.host_pages import HostPages, PageMove
from paged.pool import OutOfPages, PagePool


def pool_of(pages: int, host_pages: int, stack_size: int = 1) -> PagePool:
    """A pool with this many pages besides the null page, and as many host pages."""
    pool = PagePool(pages + 1, page_size=4)
    pool.host = HostPages(host_pages, stack_size)
    return pool


def cached(pool: PagePool, *names: bytes, group: int = 0) -> list[int]:
    """Put one page per name into the prefix cache, the first name least recently used."""
    pages = pool.allocate(len(names))
    for page, name in zip(pages, names, strict=True):
        pool.register(page, name, group)
        pool.release([page])
    return pages


def fill(pool: PagePool) -> None:
    """Evict whatever is cached."""
    pool.release(pool.allocate(pool.num_available))


def test_without_host_pages_nothing_is_kept() -> None:
    pool = pool_of(2, host_pages=0)
    cached(pool, b"a")
    fill(pool)
    assert pool.take_moves() == ()
    assert pool.find(b"a", on_host=True) is None


def test_what_is_evicted_goes_to_the_host_and_comes_back() -> None:
    pool = pool_of(2, host_pages=3)
    [page] = cached(pool, b"a")
    fill(pool)
    assert pool.take_moves() == (PageMove(page, 0, True, b"a"),)
    assert pool.match([b"a"]) == []
    [found] = pool.match([b"a"], on_host=True)
    assert pool.is_on_host(found)
    [loaded] = pool.bring([found])
    assert pool.take_moves() == (PageMove(loaded, 0, False, b"a"),)
    assert pool.match([b"a"], on_host=True) == [loaded], "pages come before host pages"
    assert pool._references[loaded] == 1
    assert (pool.num_saved, pool.num_loaded) == (1, 1)


def test_what_the_host_knows_is_not_written_again() -> None:
    pool = pool_of(1, host_pages=2)
    cached(pool, b"a")
    fill(pool)
    pool.release(pool.bring(pool.match([b"a"], on_host=True)))
    pool.take_moves()
    fill(pool)
    assert pool.take_moves() == ()
    assert pool.match([b"a"], on_host=True)


def test_the_least_recently_used_host_page_is_taken() -> None:
    pool = pool_of(1, host_pages=2)
    for name in (b"a", b"b"):
        cached(pool, name)
    fill(pool)
    pool.release(pool.bring(pool.match([b"a"], on_host=True)))  # now used last
    cached(pool, b"c")
    fill(pool)
    known = [name for name in (b"a", b"b", b"c") if pool.match([name], on_host=True)]
    assert known == [b"a", b"c"]


def test_a_stack_is_used_and_forgotten_as_a_whole() -> None:
    host = HostPages(5, stack_size=2)
    assert [host.take(name) for name in (b"a", b"b", b"c", b"d", b"e")] == [0, 1, 2, 3, 4]
    assert host.take(b"b") is None, "and now its stack is used last"
    assert [host.take(name) for name in (b"f", b"g")] == [2, 3]
    assert [host.find(name) for name in (b"a", b"c", b"d")] == [0, None, None]
    host.hold([1])
    assert [host.take(name) for name in (b"h", b"i", b"j")] == [4, 2, 3]
    host.let_go([1])
    assert host.num_used == 5
    host.check()


def test_a_stack_on_hold_is_filled_on_but_not_anew() -> None:
    host = HostPages(2, stack_size=2)
    host.take(b"a")
    host.hold([0])
    assert [host.take(name) for name in (b"b", b"c")] == [1, None]
    assert host.find(b"a") == 0
    host.let_go([0])
    assert host.take(b"c") == 0
    assert [host.find(name) for name in (b"a", b"b")] == [None, None]
    assert host.num_used == 1
    host.check()


def test_a_page_that_is_forgotten_leaves_the_others_of_its_stack() -> None:
    host = HostPages(6, stack_size=2)
    assert [host.take(name) for name in (b"a", b"b", b"c", b"d")] == [0, 1, 2, 3]
    host.forget(b"b")
    host.forget(b"unknown")
    host.check()
    assert [host.find(name) for name in (b"a", b"b", b"c", b"d")] == [0, None, 2, 3]
    assert host.num_used == 3
    assert [host.take(name) for name in (b"b", b"e", b"f", b"g")] == [4, 5, 0, 1]
    assert host.find(b"a") is None
    host.check()


def test_a_load_is_not_overwritten_by_what_has_to_make_room_for_it() -> None:
    pool = pool_of(2, host_pages=2)
    cached(pool, b"a", b"b")
    fill(pool)
    cached(pool, b"c", b"d")
    pool.take_moves()
    found = pool.match([b"a", b"b"], on_host=True)
    pages = pool.bring(found)
    loads = [PageMove(pages[0], 0, False, b"a"), PageMove(pages[1], 1, False, b"b")]
    assert list(pool.take_moves()) == loads, "c and d found no host page"
    assert pool.match([b"c"], on_host=True) == []
    pool.check()


def test_room_for_pages_of_the_host_is_counted() -> None:
    pool = pool_of(3, host_pages=3)
    cached(pool, b"a", b"b")
    fill(pool)
    found = pool.match([b"a", b"b"], on_host=True)
    assert pool.can_allocate(1, shared=found)
    assert not pool.can_allocate(2, shared=found)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 available"):
        pool.bring(found)


def test_groups_are_told_apart_and_windows_need_not_all() -> None:
    pool = pool_of(4, host_pages=8)
    names = [b"a", b"b", b"c"]
    cached(pool, *names)
    fill(pool)
    cached(pool, *names[1:], group=1)
    fill(pool)
    assert find_prefix(pool, names, (None, 6)) == [[], []]
    whole, window = find_prefix(pool, names, (None, 6), on_host=True)
    assert window[0] == 0, "the window does not see the first page"
    assert len({*whole, *window[1:]}) == 5
    assert all(map(pool.is_on_host, [*whole, *window[1:]]))


def test_reset_empties_the_host() -> None:
    pool = pool_of(2, host_pages=2)
    cached(pool, b"a")
    fill(pool)
    assert pool.reset_prefix_cache()
    assert pool.match([b"a"], on_host=True) == []
    assert (pool.host.num_used, pool.take_moves()) == (0, ())
    pool.check()


def test_broken_bookkeeping_is_caught() -> None:
    host = HostPages(1)
    assert host.take(b"a") == 0
    host.hold([0])
    assert host.take(b"b") is None, "it is on hold"
    with pytest.raises(AssertionError, match="on hold"):
        host.clear()
    with pytest.raises(AssertionError, match="on hold"):
        host.check()
    host.let_go([0])
    host.check()


class HostMachine(RuleBasedStateMachine):
    """A small pool and fewer or more host pages, with what is in the memory of both.

    Contents are names here. Every move is made some time after it was decided, together with those
    decided since the last time, and before pages are written to, as a step does it.
    """

    SIZE = 5
    STACK = 1
    NAMES = tuple(bytes([letter]) for letter in b"abcdefghi")

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(self.SIZE, host_pages=4, stack_size=self.STACK)
        self.tables: list[list[int]] = []
        self.pages: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.ever: set[bytes] = set()  # names since the last reset
        self.num_moves = {True: 0, False: 0}

    def move(self) -> None:
        for page, host_page, to_host, content in self.pool.take_moves():
            assert (self.pages[page] if to_host else self.host[host_page]) == content
            self.num_moves[to_host] += 1
            if to_host:
                self.host[host_page] = self.pages[page]
            else:
                self.pages[page] = self.host[host_page]

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    def compute(self, names: list[bytes]) -> None:
        """What a sequence does: share what is there, and write what is not."""
        found = [self.pool.find(name, on_host=True) for name in names]
        shared = [page for page in found if page is not None]
        if not self.pool.can_allocate(len(names) - len(shared), shared):
            return
        brought = self.pool.bring(shared)
        own = self.pool.allocate(len(names) - len(shared))
        missing = [name for name, page in zip(names, found, strict=True) if page is None]
        for page, name in zip(own, missing, strict=True):
            self.pool.register(page, name)
        self.tables.append([*brought, *own])
        self.ever.update(names)
        self.move()
        self.pages.update(zip(own, missing, strict=True))
        present = [name for name, page in zip(names, found, strict=True) if page is not None]
        assert [self.pages[page] for page in brought] == present

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.tables)
        if not self.tables:
            self.ever.clear()

    @invariant()
    def everything_is_where_it_can_be_found(self) -> None:
        pool = self.pool
        pool.check()
        assert self.num_moves == {True: pool.num_saved, False: pool.num_loaded}
        assert pool.host.num_used <= pool.host.num_pages
        for name in self.NAMES:
            page = pool.find(name, on_host=True)
            if page is not None and pool.is_on_host(page):
                assert self.host[page - pool.num_pages] == name
            elif page is not None:
                assert self.pages[page] == name

    @invariant()
    def nothing_is_lost_while_there_is_room(self) -> None:
        if self.STACK == 1 and self.pool.host.num_used < self.pool.host.num_pages:
            assert all(self.pool.find(name, on_host=True) for name in self.ever)


class StackMachine(HostMachine):
    """The same of host pages that lie together, the last of them alone, some with gaps."""

    STACK = 3

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.NAMES))
        self.pool.forget([name])
        assert self.pool.find(name, on_host=True) is None


TestHostMachine = HostMachine.TestCase
TestStackMachine = StackMachine.TestCase
TestHostMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestStackMachine.settings = TestHostMachine.settings
