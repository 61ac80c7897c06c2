"""The page tables of sequences: how they begin, grow and end, in every group of layers.

Groups that see all (see `paged.groups`) take pages for a whole prompt when it is admitted. Those
with a window take them chunk by chunk, and give back what the window has left behind, so that a
long prompt passes through few pages. They do so before a step's row is added, judged by its first
token: whoever gets the pages then writes to them in that step at the earliest, in which nobody
reads them any more.
"""

from __future__ import annotations

from itertools import islice, zip_longest
from typing import NamedTuple

from paged.groups import Windows, entries_behind, most_entries
from paged.hits import find_prefix
from paged.pool import NULL_PAGE, PagePool, Part
from paged.prefix import extend_hashes, page_hash, root_hash
from paged.runtime.draft import Draft
from paged.runtime.load_costs import LoadCosts
from paged.runtime.plan import PageCopy
from paged.runtime.sequence import Sequence


class Prefix(NamedTuple):
    """The first tokens of a waiting sequence, as far as pages hold them already.

    Attributes:
        num_tokens: how many.
        tables: for each group, their pages; the last may be filled in part.
        num_behind: entries of each table that its window does not reach from the next token.
        num_full: entries whose pages are full.
        num_from_host: tokens of them that need not be computed thanks to host pages.
        instead: the same without a page that is filled in part, where the prefix cache has one;
            it can be taken for what is written then.
    """

    num_tokens: int
    tables: list[list[int]]
    num_behind: list[int]
    num_full: int
    num_from_host: int = 0
    instead: Prefix | None = None

    @property
    def shared(self) -> list[int]:
        """Its full pages, to be brought. The other would be written to: it is copied."""
        tables = zip(self.tables, self.num_behind, strict=True)
        return [page for table, behind in tables for page in table[behind : self.num_full]]

    @property
    def copied(self) -> list[int]:
        """Its pages that are filled in part, one for each group or none."""
        return [page for table in self.tables for page in table[self.num_full :]]


class PageTables:
    """Takes pages of a pool for sequences, and gives them back.

    Args:
        windows: of the groups of layers.
        longest_chunk: tokens of a sequence in a step at most.
        load_costs: of host pages.
    """

    def __init__(
        self, pool: PagePool, windows: Windows, longest_chunk: int, load_costs: LoadCosts
    ) -> None:
        self._pool = pool
        self._load_costs = load_costs
        self._page_size = pool.page_size
        self._windows = windows
        self._longest_chunk = longest_chunk
        self._moving = [(group, window) for group, window in enumerate(windows) if window]

    def num_pages(self, num_tokens: int) -> int:
        """Entries of a table that hold so many tokens."""
        return -(-num_tokens // self._page_size)

    def no_prefix(self) -> Prefix:
        """Everything is to be computed."""
        return self._prefix(0, [[] for _ in self._windows])

    def cached_prefix(self, sequence: Sequence) -> Prefix:
        """What the prefix cache holds of all but the last of its known tokens.

        Host pages count where loading them takes less time than computing their tokens.
        """
        if not self._pool.enable_prefix_caching:
            return self.no_prefix()
        return self._with_part(sequence, self._full_prefix(sequence))

    def _full_prefix(self, sequence: Sequence) -> Prefix:
        """As far as it is made of full pages."""
        num_pages = (sequence.num_tokens - 1) // self._page_size
        self._hash_pages(sequence, num_pages)
        hashes = sequence.page_hashes[:num_pages]
        prefix = self._found_prefix(hashes)
        if prefix.num_full == num_pages or not self._pool.host.num_used:
            return prefix
        more = self._found_prefix(hashes, on_host=True)
        num_gained = more.num_tokens - prefix.num_tokens
        num_loads = sum(map(self._pool.is_on_host, more.shared))
        if not self._load_costs.are_worth(num_loads, num_gained):
            return prefix
        return more._replace(num_from_host=num_gained)

    def _found_prefix(self, hashes: list[bytes], *, on_host: bool = False) -> Prefix:
        tables = find_prefix(self._pool, hashes, self._windows, on_host=on_host)
        return self._prefix(len(tables[0]) * self._page_size, tables)

    def _with_part(self, sequence: Sequence, prefix: Prefix) -> Prefix:
        """The prefix, and the most that pages which are filled in part hold of what follows."""
        start = prefix.num_tokens
        most = min(self._page_size, sequence.num_tokens - start) - 1
        parent = self._parent_hash(sequence, prefix.num_full)
        lengths = [each for each in self._pool.part_lengths(parent) if each <= most]
        tokens = sequence.tokens(start, start + max(lengths, default=0))
        for length in lengths:
            pages = self._find_in_all(page_hash(parent, tokens[:length]))
            if pages is not None:
                tables = [[*table, page] for table, page in zip(prefix.tables, pages, strict=True)]
                part = self._prefix(start + length, tables)
                return part._replace(num_from_host=prefix.num_from_host, instead=prefix)
        return prefix

    def _find_in_all(self, name: bytes) -> list[int] | None:
        """The pages of that hash in every group, if all have one."""
        pages = list[int]()
        for group in range(len(self._windows)):
            if (page := self._pool.find(name, group)) is None:
                return None
            pages.append(page)
        return pages

    def _parent_hash(self, sequence: Sequence, num_pages: int) -> bytes:
        """The hash that comes before that of the page behind so many full ones."""
        self._hash_pages(sequence, num_pages)
        return sequence.page_hashes[num_pages - 1] if num_pages else root_hash(sequence.cache_salt)

    def forked_prefix(self, sequence: Sequence, parent: Sequence) -> Prefix | None:
        """All but the last token of the prompt in its parent's pages, unless some are gone."""
        num_tokens = len(sequence.prompt) - 1
        num_pages = self.num_pages(num_tokens)
        prefix = self._prefix(num_tokens, [table[:num_pages] for table in parent.page_tables])
        behind = zip(parent.num_behind, prefix.num_behind, strict=True)
        if any(gone > unseen for gone, unseen in behind):
            return None
        sequence.page_hashes = parent.page_hashes[: prefix.num_full]
        return prefix

    def _prefix(self, num_tokens: int, tables: list[list[int]]) -> Prefix:
        page_size = self._page_size
        behind = [entries_behind(window, num_tokens, page_size) for window in self._windows]
        return Prefix(num_tokens, tables, behind, num_tokens // page_size)

    def num_own(self, sequence: Sequence, prefix: Prefix) -> int:
        """Pages beside the shared ones that all its known tokens take, as many at once as ever."""
        num_pages, num_own = self.num_pages(sequence.num_tokens), 0
        for window, behind in zip(self._windows, prefix.num_behind, strict=True):
            most = most_entries(window, sequence.num_tokens, self._longest_chunk, self._page_size)
            num_own += min(num_pages - behind, most) - (prefix.num_full - behind)
        return num_own

    def start(self, draft: Draft, sequence: Sequence, prefix: Prefix, length: int) -> None:
        """Give an admitted sequence its prefix, and pages for the `length` tokens that follow.

        Where a group sees all, for all known tokens.
        """
        self._pool.share(prefix.copied)  # else they might be taken for what is written
        draft.sources += prefix.copied
        sequence.part_ends += [prefix.num_tokens] * bool(prefix.copied)
        full = iter(self._pool.bring(prefix.shared))
        sequence.num_computed = prefix.num_tokens
        sequence.num_registered, sequence.num_behind = prefix.num_full, prefix.num_behind
        end = prefix.num_tokens + length
        for group, window in enumerate(self._windows):
            pages, behind = prefix.tables[group], prefix.num_behind[group]
            reach = self.num_pages(sequence.num_tokens if window is None else end)
            own = self._pool.allocate(reach - prefix.num_full)
            sequence.page_tables.append([NULL_PAGE] * behind)
            brought = list(islice(full, prefix.num_full - behind))
            draft.give_pages(sequence, group, brought + own)
            draft.copies += map(PageCopy, pages[prefix.num_full :], own)
        self._set_horizon(sequence, end, min(map(len, sequence.page_tables)))

    def missing(self, sequence: Sequence, end: int) -> list[int]:
        """Pages that its tables lack to reach `end`, after giving back what windows left behind."""
        if self._moving:
            self._leave_behind(sequence)
        num_pages = -(-end // self._page_size)
        return [max(num_pages - len(table), 0) for table in sequence.page_tables]

    def grow(self, draft: Draft, sequence: Sequence, missing: list[int], end: int) -> None:
        """Let its tables reach `end` by the pages they lack."""
        for group, count in enumerate(missing):
            draft.give_pages(sequence, group, self._pool.allocate(count))
        self._set_horizon(sequence, end, -(-end // self._page_size))

    def _set_horizon(self, sequence: Sequence, end: int, num_pages: int) -> None:
        """Have its tables of so many pages seen to when those are full.

        After a chunk, of which windows leave much behind, at once.
        """
        after_chunk = self._moving and end - sequence.num_computed > 1
        sequence.horizon = end if after_chunk else num_pages * self._page_size

    def _leave_behind(self, sequence: Sequence) -> None:
        """Give back the pages that windows have left behind.

        One token more is kept than the next one sees: forks compute the prompt's last token again.
        """
        left = []
        for group, window in self._moving:
            table, since = sequence.page_tables[group], sequence.num_behind[group]
            until = entries_behind(window, sequence.num_computed - 1, self._page_size)
            if until > since:
                left.append(table[since:until])
                table[since:until] = [NULL_PAGE] * (until - since)
                sequence.num_behind[group] = until
        self._pool.release(_entry_by_entry(left))

    def register(self, sequence: Sequence) -> None:
        """Let the pool find the pages that are full of known tokens, scheduled to be written."""
        first = sequence.num_registered
        full = min(sequence.num_computed, sequence.num_tokens) // self._page_size
        if full <= first or not self._pool.enable_prefix_caching:
            return
        self._hash_pages(sequence, full)
        for group, table in enumerate(sequence.page_tables):
            for index in range(first, full):
                if (page := table[index]) != NULL_PAGE:
                    self._pool.register(page, sequence.page_hashes[index], group)
        sequence.num_registered = full

    def _hash_pages(self, sequence: Sequence, num_pages: int) -> None:
        """Extend the sequence's page hashes to its first `num_pages` pages."""
        hashes, page_size = sequence.page_hashes, self._page_size
        if len(hashes) < num_pages:
            tokens = sequence.tokens(len(hashes) * page_size, num_pages * page_size)
            extend_hashes(hashes, tokens, page_size, sequence.cache_salt)

    def _register_part(self, sequence: Sequence) -> None:
        """Let the pool find its last page, which is not full."""
        known = min(sequence.num_computed, sequence.num_tokens)
        num_full, length = divmod(known, self._page_size)
        if not length or not self._pool.enable_prefix_caching:
            return
        name = self._part_hash(sequence, known)
        part = Part(self._parent_hash(sequence, num_full), length)
        sequence.part_ends.append(known)
        for group, table in enumerate(sequence.page_tables):
            if (page := table[num_full]) != NULL_PAGE:  # a window may have passed by on its way
                self._pool.register(page, name, group, part=part)

    def _part_hash(self, sequence: Sequence, end: int) -> bytes:
        """The hash of the page that its tokens up to `end` fill in part."""
        num_full, length = divmod(end, self._page_size)
        return page_hash(self._parent_hash(sequence, num_full), sequence.tokens(end - length, end))

    def forget(self, sequence: Sequence) -> None:
        """Let nobody find what it has computed or read, now or when its pages are released.

        By hashes, for its pages may be others' by now, or on the host.
        """
        self._hash_pages(sequence, sequence.num_tokens // self._page_size)
        parts = [self._part_hash(sequence, end) for end in sequence.part_ends]
        self._pool.forget([*sequence.page_hashes, *parts], len(self._windows))
        sequence.num_computed = 0

    def release(self, sequence: Sequence) -> None:
        """Give all its pages back."""
        self._register_part(sequence)
        self._pool.release(_entry_by_entry(sequence.page_tables))
        sequence.page_tables = []
        sequence.num_computed = 0
        sequence.num_registered = 0


def _entry_by_entry(tables: list[list[int]]) -> list[int]:
    """The pages of all tables, those of the same tokens together, so that they age together."""
    entries = zip_longest(*tables, fillvalue=NULL_PAGE)
    return [page for entry in entries for page in entry if page != NULL_PAGE]
