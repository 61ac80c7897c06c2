"""The disk behind the other tiers of the prefix cache: what is read from it, and left on it.

What of a prompt is on the disk alone, and worth it, is read before its request is queued; other
requests go on meanwhile. It becomes host pages, where the scheduler finds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paged.cache import PageStack
from paged.groups import Windows
from paged.hits import find_prefix, find_tables
from paged.host_pages import STACK_SIZE, PageMove
from paged.pool import PagePool, of_group
from paged.prefix import extend_hashes
from paged.runtime.disk_pages import DiskPages, Fetched, FoundPage
from paged.runtime.ending import LONGEST_SAVING
from paged.runtime.load_costs import LoadCosts
from paged.runtime.messages import Saving
from paged.runtime.runner import StepRunner

logger = logging.getLogger(__name__)

# Seconds that a stop takes for pages: so many times what the disk was measured to take, within
# bounds. Whoever waits for the process waits as long.
_PATIENCE = 2.0
_SHORTEST_STOP = 5.0
_BETWEEN_LINES = 2.0
_BETWEEN_LOOKS = 0.05


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
        pool.on_forget = files.forget
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
        """Keep in host memory what was read, but for what was forgotten meanwhile."""
        wanted = [(page_hash, arrays) for page_hash, arrays in found if page_hash in self.files]
        taken = [(self._pool.host.take(page_hash), arrays) for page_hash, arrays in wanted]
        kept = {page: arrays for page, arrays in taken if page is not None}
        self._runner.host.put(list(kept), list(kept.values()))

    def closing(self, *, saves_device: bool) -> Iterator[Saving]:
        """Write what waits to be written, and what the device still holds if that is wanted.

        It takes no longer than it says at first; what is not written by then is left out. What was
        used last goes first: whoever waits for this process may lose patience.
        """
        moves = self._moves_off_the_device() if saves_device else []
        num_pages, left_out = len(moves) + self.files.num_waiting, self.files.num_left_out
        seconds = _PATIENCE * num_pages * self.files.seconds_to_write
        seconds = min(max(seconds, _SHORTEST_STOP), LONGEST_SAVING)
        until = time.monotonic() + seconds
        if num_pages:
            logger.info("Writing %d KV pages to disk, for %.0f s at most", num_pages, seconds)
        for num_left in self._save(moves, until):
            left = max(until - time.monotonic(), 0)
            yield Saving(num_pages - num_left, num_pages, left)
        self.files.close(max(until - time.monotonic(), 0))
        if num_missing := self.files.num_left_out - left_out:
            logger.warning("The stop left out %d of them: no time was left", num_missing)

    def _moves_off_the_device(self) -> list[PageMove]:
        """Those of all that is cached there, used last first, as far as the disk has room."""
        self._pool.release(self._pool.allocate(self._pool.num_available))
        moves = [move for move in self._pool.take_moves() if move.to_host]
        return moves[::-1][: self.files.max_pages]

    def _save(self, moves: list[PageMove], until: float) -> Iterator[int]:
        """Give pages to the writer until a time, and wait for it; how many are left meanwhile."""

        def write(page_hashes: Sequence[bytes], stack: PageStack) -> None:
            self.files.write(page_hashes, stack, seconds=max(until - time.monotonic(), 0))

        self._runner.host.on_save = write
        told = time.monotonic()
        while (moves or self.files.num_waiting) and time.monotonic() < until:
            part, moves = moves[:STACK_SIZE], moves[STACK_SIZE:]
            self._runner.move(tuple(part))
            num_left = len(moves) + self.files.num_waiting
            yield num_left
            if time.monotonic() > told + _BETWEEN_LINES:
                told = time.monotonic()
                logger.info("%d KV pages are left to be written to disk", num_left)
            if not part:
                time.sleep(_BETWEEN_LOOKS)
        self.files.num_left_out += len(moves)

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
