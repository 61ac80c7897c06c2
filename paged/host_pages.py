"""The pages of host memory behind the pool: what they hold, and which may be taken for new content.

Content that is evicted from the pool's pages goes on here, under the same hash, until it is among
the least recently used and its host page is wanted. Content that comes back stays here too: evicted
again, it need not be written again.

Host pages lie in stacks of consecutive ones, since what moves as one array is one piece of memory
there: a stack is filled page by page, used when any of its pages is, and forgotten as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

STACK_SIZE = 16
"""Pages of a stack; the last one may have fewer."""


class PageMove(NamedTuple):
    """Content, named by its hash, is written from a page to a host page, or comes back from there.

    Moves take effect in the order in which they were decided: so each finds what it is to move,
    and nothing is lost that a later one overwrites.
    """

    page: int
    host_page: int
    to_host: bool
    page_hash: bytes


class HostPages:
    """Finds host pages 0 to num_pages - 1 by the hash of their content.

    Attributes:
        num_pages: host pages; with none, nothing is ever found.
        stack_size: of them that lie together.
    """

    def __init__(self, num_pages: int = 0, stack_size: int = STACK_SIZE) -> None:
        self.num_pages = num_pages
        self.stack_size = stack_size
        num_stacks = -(-num_pages // stack_size)
        self._free = list(range(num_stacks - 1, -1, -1))  # a stack of them: 0 is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()  # not on hold; least recently used first
        self._next = self._end = 0  # pages of the stack that is being filled
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_used(self) -> int:
        """Those that hold something."""
        return len(self._page_of)

    def find(self, page_hash: bytes) -> int | None:
        """The page that holds the content of that hash."""
        return self._page_of.get(page_hash)

    def hash_of(self, page: int) -> bytes:
        """The hash of what a page holds."""
        return self._hash_of[page]

    def take(self, page_hash: bytes) -> int | None:
        """A page for content to be written to; None if it is here, or every stack is on hold."""
        known = self._page_of.get(page_hash)
        if known is not None:
            self._use(known)
            return None
        if self._next == self._end and not self._open_stack():
            return None
        page = self._next
        self._next += 1
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        self._use(page)
        return page

    def hold(self, pages: Sequence[int]) -> None:
        """Keep pages from being taken, until `let_go`."""
        for stack in self._stacks_of(pages):
            del self._idle[stack]

    def let_go(self, pages: Sequence[int]) -> None:
        """End their hold. The last counts as used first, as the pool's `release` has it."""
        for stack in self._stacks_of(pages[::-1]):
            self._idle[stack] = None

    def forget(self, page_hash: bytes) -> None:
        """Free the page that holds the content of that hash, if one does that is not on hold."""
        page = self._page_of.get(page_hash)
        if page is not None and page in self._idle:
            del self._idle[page]
            del self._page_of[self._hash_of.pop(page)]
            self._free.append(page)

    def clear(self) -> None:
        """Forget all content; no page may be on hold."""
        assert len(self._idle) == self._num_stacks_used, "a host page is on hold"
        self._free.extend(self._idle)
        self._idle.clear()
        self._next = self._end = 0
        self._page_of.clear()
        self._hash_of.clear()

    def check(self) -> None:
        """Assert that every stack is free or holds something, and none is on hold."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a stack is free twice"
        num_stacks = -(-self.num_pages // self.stack_size)
        assert free | idle == set(range(num_stacks)), "a host page is on hold, or in no state"
        assert not free & idle, "a stack is in two states"
        held = {page for stack in idle for page in self._pages_of(stack)}
        filling = set(range(self._next, self._end))
        assert self._hash_of.keys() == held - filling, "a host page is idle without content"
        assert {page: page_hash for page_hash, page in self._page_of.items()} == self._hash_of

    @property
    def _num_stacks_used(self) -> int:
        return -(-self.num_pages // self.stack_size) - len(self._free)

    def _pages_of(self, stack: int) -> range:
        first = stack * self.stack_size
        return range(first, min(first + self.stack_size, self.num_pages))

    def _stacks_of(self, pages: Sequence[int]) -> list[int]:
        """Each stack once, the one of the first page first."""
        return list(dict.fromkeys(page // self.stack_size for page in pages))

    def _use(self, page: int) -> None:
        stack = page // self.stack_size
        if stack in self._idle:
            self._idle.move_to_end(stack)

    def _open_stack(self) -> bool:
        """Have another stack filled; if none is free, the least recently used one is forgotten."""
        if self._free:
            stack = self._free.pop()
        elif self._idle:
            stack, _ = self._idle.popitem(last=False)
            for page in self._pages_of(stack):
                del self._page_of[self._hash_of.pop(page)]
        else:
            return False
        self._idle[stack] = None
        pages = self._pages_of(stack)
        self._next, self._end = pages.start, pages.stop
        return True
