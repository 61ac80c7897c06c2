"""The disk behind the other tiers of the prefix cache: what is read from it, and left on it.

What of a prompt is on the disk alone, and worth it, is read before its request is queued; other
requests go on meanwhile. It becomes host pages, where the scheduler finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from paged.groups import Windows
from paged.hits import find_prefix, find_tables
from paged.pool import PagePool, of_group
from paged.prefix import extend_hashes
from paged.runtime.disk_pages import DiskPages, Fetched, FoundPage
from paged.runtime.load_costs import LoadCosts
from paged.runtime.runner import StepRunner


class DiskTier:
    """Looks prompts up in all three tiers, and moves pages between the disk and the others.

    Attributes:
        files: the pages on disk; what goes to host memory is written there too.
    """

    def __init__(
        self,
        files: DiskPages,
        pool: PagePool,
        runner: StepRunner,
        windows: Windows,
        load_costs: LoadCosts,
    ) -> None:
        runner.host.on_save = files.write
        self.files = files
        self._pool = pool
        self._runner = runner
        self._windows = windows
        self._load_costs = load_costs
        self._on_disk = pool.num_pages + pool.host.num_pages  # a number that no page has

    def fetch(self, prompt: list[int], salt: str) -> Fetched | None:
        """Begin to read what the other tiers lack of a prompt; None if that is not worth it."""
        page_size, hashes = self._pool.page_size, list[bytes]()
        extend_hashes(hashes, prompt[:-1], page_size, salt)
        near = find_prefix(self._pool, hashes, self._windows, on_host=True)
        tables = find_tables(self._find, self._match, page_size, hashes, self._windows)
        wanted = [
            of_group(hashes[entry], group)
            for group, table in enumerate(tables)
            for entry, page in enumerate(table)
            if page == self._on_disk
        ]
        num_gained = (len(tables[0]) - len(near[0])) * page_size
        per_page = self._load_costs.per_page + self.files.seconds_per_page
        costs = replace(self._load_costs, per_page=per_page)
        if len(wanted) > self._pool.host.num_pages or not costs.are_worth(len(wanted), num_gained):
            return None
        return self.files.fetch(wanted)

    def take_in(self, found: list[FoundPage]) -> None:
        """Keep in host memory what was read."""
        taken = [(self._pool.host.take(page_hash), arrays) for page_hash, arrays in found]
        kept = {page: arrays for page, arrays in taken if page is not None}
        self._runner.host.put(list(kept), list(kept.values()))

    def close(self, *, saves_device: bool) -> None:
        """Write what waits to be written, and what the device still holds if that is wanted.

        What was used last goes first: whoever waits for this process may lose patience.
        """
        if saves_device:
            self._runner.host.on_save = partial(self.files.write, wait=True)
            self._pool.release(self._pool.allocate(self._pool.num_available))
            self._runner.move(self._pool.take_moves()[::-1][: self.files.max_pages])
        self.files.close()

    def _find(self, page_hash: bytes, group: int) -> int | None:
        page = self._pool.find(page_hash, group, on_host=True)
        if page is None and of_group(page_hash, group) in self.files:
            return self._on_disk
        return page

    def _match(self, hashes: Sequence[bytes], group: int) -> list[int]:
        pages = []
        for page_hash in hashes:
            page = self._find(page_hash, group)
            if page is None:
                break
            pages.append(page)
        return pages
