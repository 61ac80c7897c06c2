"""The pool: who holds which page of the KV cache, and which pages can be read again.

Every page but the null page is in one of three states, and the three always add up:

    free --allocate--> used --release--> cached (if it carries a hash) --allocate--> used
      ^                  |                  |     |
      +-----release------+                  |     +--share--> used
      +-----------------forget--------------+

A used page is held by one or more page tables, which the pool counts. A cached page is held by
nobody but carries the hash of its content; it is shared again on a hit, or evicted, least recently
used first, when the free pages run out. All operations take constant time per page.

A page that its sequence left before it was full carries the hash of the tokens that are in it. Who
goes on from there would write to it, and so copies it.

A page serves the layers of one group (see `paged.groups`): tokens have a page in each, and so their
hash names one page a group.

What is evicted may go on in host memory (see `paged.host_pages`). To those who look content up,
host pages are more pages, numbered from `num_pages` on; `bring` makes them pages to be read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paged.host_pages import HostPages, PageMove

# Page tables are padded with it: it belongs to nobody and nothing reads it unmasked.
NULL_PAGE = 0


class OutOfPages(RuntimeError):
    """More pages were asked for than are free or can be evicted."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} pages needed, {available} available")
        self.needed = needed
        self.available = available


class Part(NamedTuple):
    """The tokens of a page that is not full: the hash that comes before them, and how many."""

    parent: bytes
    length: int


class PagePool:
    """Counts the references to pages 1 to num_pages - 1 and finds them by their hash.

    Attributes:
        num_pages: pages of the cache, the null page included.
        page_size: tokens a page holds.
        enable_prefix_caching: whether pages keep their hash when nobody holds them any more.
        host: where the content of evicted pages goes.
        num_saved, num_loaded: pages written to the host so far, and those that came back.
        on_forget: told the hashes of content that is not to be trusted.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        num_host_pages: int = 0,
    ) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"a pool needs at least 2 pages (one is the null page) of at least 1 token, "
                f"got num_pages={num_pages} and page_size={page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.host = HostPages(num_host_pages)
        self.num_saved = self.num_loaded = 0
        self.on_forget: Callable[[Sequence[bytes]], None] = lambda hashes: None
        self._moves: list[PageMove] = []
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: page 1 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        # Pages with a hash that are not full; how many of each length follow each hash.
        self._partial: dict[int, Part] = {}
        self._lengths: dict[bytes, Counter[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can still give out."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_available

    def states(self) -> bytes:
        """Each page from 1 on: free (0), cached (1), used (2), or used by several sequences (3)."""
        states = bytearray(min(count + 1, 3) if count else 0 for count in self._references)
        for page in self._cached:
            states[page] = 1
        return bytes(states[1:])

    def can_allocate(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Whether `count` pages can be allocated after the pages `shared` have been brought."""
        taken = sum(self.is_on_host(page) or not self._references[page] for page in shared)
        return count <= self.num_available - taken

    def is_on_host(self, page: int) -> bool:
        """Whether the number is that of a host page."""
        return page >= self.num_pages

    def allocate(self, count: int) -> list[int]:
        """Take pages for new content: free ones first, then the least recently used cached ones.

        Raises:
            OutOfPages: there are fewer than `count`; none is taken.
        """
        if count > self.num_available:
            raise OutOfPages(count, self.num_available)
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each page; all must be used or cached."""
        for page in pages:
            if not self._references[page]:
                assert page in self._cached, f"page {page} is free: it has no content to share"
                del self._cached[page]
            self._references[page] += 1

    def bring(self, pages: Sequence[int]) -> list[int]:
        """Share pages that were found; for each on the host a page is taken, to be loaded from it.

        Raises:
            OutOfPages: see `can_allocate`.
        """
        self.share([page for page in pages if not self.is_on_host(page)])
        host_pages = [page - self.num_pages for page in pages if self.is_on_host(page)]
        self.host.hold(host_pages)  # else what the new pages held might be written there
        loaded = self.allocate(len(host_pages))
        for page, host_page in zip(loaded, host_pages, strict=True):
            page_hash = self.host.hash_of(host_page)
            self._name(page, page_hash)
            self._moves.append(PageMove(page, host_page, to_host=False, page_hash=page_hash))
        self.host.let_go(host_pages)
        self.num_loaded += len(loaded)
        new = iter(loaded)
        return [next(new) if self.is_on_host(page) else page for page in pages]

    def take_moves(self) -> tuple[PageMove, ...]:
        """What has to be moved before anything is written to the pages allocated since last time.

        All of it was written before that time, or is moved itself.
        """
        moves = tuple(self._moves)
        self._moves.clear()
        return moves

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page; those that nobody holds any more are cached or free.

        Args:
            pages: in the order of their page table. The last is released first, and so evicted
                first: a prefix without its tail is worth more than a tail without its prefix.
        """
        for page in reversed(pages):
            assert self._references[page], f"page {page} is released more often than it was taken"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def register(
        self, page: int, page_hash: bytes, group: int = 0, *, part: Part | None = None
    ) -> None:
        """Let a used page be found by the hash of its content, in its group of layers.

        If another page holds that hash already, this one stays without: a hash names one page.

        Args:
            part: of a page that is not full. It does not go on in host memory: as many bytes
                would be moved as of a full one, for fewer tokens.
        """
        assert self._references[page], f"page {page} is not used: its content is undefined"
        assert page not in self._hash_of, f"page {page} already carries a hash"
        page_hash = of_group(page_hash, group)
        if self.enable_prefix_caching and page_hash not in self._page_of:
            self._name(page, page_hash)
            if part is not None:
                self._partial[page] = part
                self._lengths.setdefault(part.parent, Counter())[part.length] += 1

    def part_lengths(self, parent: bytes) -> list[int]:
        """Tokens in the pages that follow a hash and are not full, most first."""
        return sorted(self._lengths.get(parent, ()), reverse=True)

    def forget(self, hashes: Sequence[bytes], num_groups: int = 1) -> None:
        """Let content be found by nobody any more, wherever it is, in any group of layers."""
        named = [of_group(each, group) for each in hashes for group in range(num_groups)]
        for page_hash in named:
            self.host.forget(page_hash)
            page = self._page_of.pop(page_hash, None)
            if page is not None:
                del self._hash_of[page]
                self._drop_part(page)
                if not self._references[page]:
                    del self._cached[page]
                    self._free.append(page)
        self.on_forget(named)

    def find(self, page_hash: bytes, group: int = 0, *, on_host: bool = False) -> int | None:
        """The page of a group that holds the content of that hash. Takes no reference.

        Args:
            on_host: whether a host page will do, where no other page holds it.
        """
        page_hash = of_group(page_hash, group)
        page = self._page_of.get(page_hash)
        if page is None and on_host:
            host_page = self.host.find(page_hash)
            return None if host_page is None else self.num_pages + host_page
        return page

    def match(self, hashes: Sequence[bytes], group: int = 0, *, on_host: bool = False) -> list[int]:
        """Pages that hold the longest known prefix of a hash chain, see `find`."""
        pages = []
        for page_hash in hashes:
            page = self.find(page_hash, group, on_host=on_host)
            if page is None:
                break
            pages.append(page)
        return pages

    def reset_prefix_cache(self) -> bool:
        """Forget all content, on the host too; refused (False) while any page is used."""
        if self.num_used:
            return False
        self.host.clear()
        self._moves.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._page_of.clear()
        self._partial.clear()
        self._lengths.clear()
        return True

    def check(self) -> None:
        """Assert that every page is free, used or cached, and that hashes and pages agree."""
        free, cached = set(self._free), set(self._cached)
        used = {page for page, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a page is free twice"
        assert all(count >= 0 for count in self._references), "a reference count is negative"
        assert free | cached | used == set(range(1, self.num_pages)), "a page is in no state"
        total = len(free) + len(cached) + len(used)
        assert total == self.num_pages - 1, "a page is in two states"
        assert len(used) == self.num_used, "the counts do not add up"
        assert cached <= self._hash_of.keys(), "a page without a hash is cached"
        assert not free & self._hash_of.keys(), "a page with a hash is free"
        assert {page: page_hash for page_hash, page in self._page_of.items()} == self._hash_of
        assert self._partial.keys() <= self._hash_of.keys(), "a page without a hash is partial"
        counted = [(part, n) for part in self._lengths for n in self._lengths[part].elements()]
        assert sorted(counted) == sorted(self._partial.values()), "a partial page is not counted"
        self.host.check()

    def _name(self, page: int, page_hash: bytes) -> None:
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash

    def _drop_part(self, page: int) -> bool:
        """A page loses its hash; whether it was not full."""
        part = self._partial.pop(page, None)
        if part is None:
            return False
        lengths = self._lengths[part.parent]
        lengths[part.length] -= 1
        if not lengths[part.length]:
            del lengths[part.length]
        if not lengths:
            del self._lengths[part.parent]
        return True

    def _evict(self) -> None:
        """Free the least recently used cached page; only the host may still know its content."""
        page, _ = self._cached.popitem(last=False)
        page_hash = self._hash_of.pop(page)
        del self._page_of[page_hash]
        is_full = not self._drop_part(page)
        host_page = self.host.take(page_hash) if is_full else None
        if host_page is not None:
            self._moves.append(PageMove(page, host_page, to_host=True, page_hash=page_hash))
            self.num_saved += 1
        self._free.append(page)


def of_group(page_hash: bytes, group: int) -> bytes:
    """The hash of what a group of layers keeps of the same tokens; all hashes have one length."""
    return page_hash + group.to_bytes(2) if group else page_hash
