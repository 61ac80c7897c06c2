"""Pages that several rows of a step read: after the first, a device has them in its cache."""

from __future__ import annotations

from collections.abc import Iterable

from paged.runtime.plan import StepPlan
from paged.runtime.sequence import Sequence


class SharedPages:
    """Counts them as sequences begin and cease to decode, since none of them changes meanwhile.

    What counts are the pages that were full when a sequence began: those that it fills afterwards
    are its own. Of groups of layers it is the first.

    Args:
        page_size: tokens of a page.
        cached_tokens: that the device's cache holds. Of more, as many are found there.
    """

    def __init__(self, page_size: int, cached_tokens: float) -> None:
        self._page_size, self._cached_tokens = page_size, cached_tokens
        self._pages: dict[Sequence, list[int]] = {}
        self._num_readers: dict[int, int] = {}
        self._num_shared = self._num_again = 0

    def again(self, plan: StepPlan) -> float:
        """Tokens of context that a row of one token finds in the cache, since another read them."""
        reading = {row.sequence: row.start for row in plan.rows if row.length == 1}
        for sequence in self._pages.keys() - reading.keys():
            self._end(self._pages.pop(sequence))
        for sequence in reading.keys() - self._pages.keys():
            num_full = reading[sequence] // self._page_size
            self._pages[sequence] = sequence.page_tables[0][:num_full]
            self._begin(self._pages[sequence])
        found = min(self._cached_tokens / max(self._page_size * self._num_shared, 1), 1.0)
        return self._page_size * self._num_again * found

    def _begin(self, pages: Iterable[int]) -> None:
        for page in pages:
            before = self._num_readers.get(page, 0)
            self._num_shared += before == 1
            self._num_again += before > 0
            self._num_readers[page] = before + 1

    def _end(self, pages: Iterable[int]) -> None:
        for page in pages:
            left = self._num_readers.pop(page) - 1
            self._num_shared -= left == 1
            self._num_again -= left > 0
            if left:
                self._num_readers[page] = left
