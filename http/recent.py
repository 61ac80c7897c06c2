"""The last minutes of a model, second by second: tokens, and how long clients waited for them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

SECONDS = 300
_SHORTEST, _RATIO = 0.0005, 1.25
_BOUNDS = [_SHORTEST * _RATIO**power for power in range(56)]  # up to 107 s
_Bins = list[int]


def _bins() -> _Bins:
    return [0] * (len(_BOUNDS) + 1)


@dataclass
class Second:
    """One second.

    Attributes:
        tokens: generated and handed on.
        firsts: times to the first token, counted by size.
        gaps: times between tokens, likewise.
    """

    tokens: int = 0
    firsts: _Bins = field(default_factory=_bins)
    gaps: _Bins = field(default_factory=_bins)

    def add_first(self, seconds: float) -> None:
        self.firsts[bisect_left(_BOUNDS, seconds)] += 1

    def add_gap(self, seconds: float) -> None:
        self.gaps[bisect_left(_BOUNDS, seconds)] += 1


class Recent:
    """The last `SECONDS` seconds, of which only those are kept that saw something."""

    def __init__(self) -> None:
        self._seconds: dict[int, Second] = {}

    def now(self) -> Second:
        """The second that it is."""
        number = int(time.time())
        second = self._seconds.get(number)
        if second is None:
            for old in [each for each in self._seconds if each <= number - SECONDS]:
                del self._seconds[old]
            second = self._seconds[number] = Second()
        return second

    @property
    def seconds(self) -> dict[int, Second]:
        """By the number of the second, `time.time`."""
        return self._seconds


class History(msgspec.Struct, frozen=True):
    """The same for a plot: an entry a second, the last of which has ended.

    Attributes:
        end: seconds, `time.time`.
        tokens: generated.
        first_p50, first_p95: milliseconds to the first token; None where there was none.
        gap_p50, gap_p95: milliseconds between tokens, likewise.
    """

    end: int
    tokens: list[int]
    first_p50: list[float | None]
    first_p95: list[float | None]
    gap_p50: list[float | None]
    gap_p95: list[float | None]


def history(processes: Iterable[dict[int, Second]], end: int) -> History:
    """What all API processes have seen until a second."""
    found = [_together(processes_at) for processes_at in _by_second(list(processes), end)]
    return History(
        end,
        [second.tokens for second in found],
        [_percentile(second.firsts, 0.5) for second in found],
        [_percentile(second.firsts, 0.95) for second in found],
        [_percentile(second.gaps, 0.5) for second in found],
        [_percentile(second.gaps, 0.95) for second in found],
    )


def _by_second(processes: list[dict[int, Second]], end: int) -> Iterable[list[Second]]:
    for number in range(end - SECONDS, end):
        yield [seconds[number] for seconds in processes if number in seconds]


def _together(seconds: list[Second]) -> Second:
    if len(seconds) == 1:
        return seconds[0]
    total = Second()
    for each in seconds:
        total.tokens += each.tokens
        total.firsts = [a + b for a, b in zip(total.firsts, each.firsts, strict=True)]
        total.gaps = [a + b for a, b in zip(total.gaps, each.gaps, strict=True)]
    return total


def _percentile(bins: _Bins, share: float) -> float | None:
    """Milliseconds that so many values do not exceed, to a tenth: the middle of their bin."""
    sums = list(accumulate(bins))
    if not sums[-1]:
        return None
    index = bisect_left(sums, share * sums[-1])
    return round(1000 * _SHORTEST * _RATIO ** (index - 0.5), 2)
