"""The pages of host memory behind the pool: what they hold, and which may be taken for new content.

Content that is evicted from the pool's pages goes on here, under the same hash, until it is the
least recently used and its host page is wanted. Content that comes back stays here too: evicted
again, it need not be written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


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
    """

    def __init__(self, num_pages: int = 0) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()  # not on hold; least recently used first
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
        """A page for content to be written to; None if it is here, or every page is on hold."""
        known = self._page_of.get(page_hash)
        if known is not None:
            if known in self._idle:
                self._idle.move_to_end(known)
            return None
        page = self._free.pop() if self._free else self._evict()
        if page is not None:
            self._page_of[page_hash] = page
            self._hash_of[page] = page_hash
            self._idle[page] = None
        return page

    def hold(self, pages: Sequence[int]) -> None:
        """Keep pages from being taken, until `let_go`."""
        for page in pages:
            del self._idle[page]

    def let_go(self, pages: Sequence[int]) -> None:
        """End their hold. The last counts as used first, as the pool's `release` has it."""
        for page in reversed(pages):
            self._idle[page] = None

    def forget(self, page_hash: bytes) -> None:
        """Free the page that holds the content of that hash, if one does that is not on hold."""
        page = self._page_of.get(page_hash)
        if page is not None and page in self._idle:
            del self._idle[page]
            del self._page_of[self._hash_of.pop(page)]
            self._free.append(page)

    def clear(self) -> None:
        """Forget all content; no page may be on hold."""
        assert len(self._idle) == len(self._page_of), "a host page is on hold"
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._hash_of.clear()

    def check(self) -> None:
        """Assert that every page is free or holds something, and none is on hold."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a host page is free twice"
        assert free | idle == set(range(self.num_pages)), "a host page is on hold, or in no state"
        assert not free & idle, "a host page is in two states"
        assert self._hash_of.keys() == idle, "a host page is idle without content"
        assert {page: page_hash for page_hash, page in self._page_of.items()} == self._hash_of

    def _evict(self) -> int | None:
        """The least recently used page, its content forgotten."""
        if not self._idle:
            return None
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page
