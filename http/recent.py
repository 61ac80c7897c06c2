"""The last minutes of a model, second by second: tokens, and how long clients waited for them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

SECONDS = 300
STEP = 5
_SHORTEST, _RATIO = 0.0005, 1.25
_BOUNDS = [_SHORTEST * _RATIO**power for power in range(56)]  # up to 107 s
_JUST_NOW = 3
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
    """The same for a plot: an entry for every `STEP` seconds, the last of which have ended.

    Attributes:
        seconds: that an entry stands for.
        rate: tokens a second just now.
        tokens: generated a second.
        first_p50, first_p95: milliseconds to the first token; None where there was none.
        gap_p50, gap_p95: milliseconds between tokens, likewise.
    """

    seconds: int
    rate: float
    tokens: list[float]
    first_p50: list[float | None]
    first_p95: list[float | None]
    gap_p50: list[float | None]
    gap_p95: list[float | None]


def history(processes: Sequence[dict[int, Second]], now: float) -> History:
    """What all API processes have seen until now."""
    end = int(now) // STEP * STEP
    starts = range(end - SECONDS, end, STEP)
    found = [_together(processes, start, start + STEP) for start in starts]
    last = _together(processes, int(now) - _JUST_NOW, int(now))
    return History(
        STEP,
        last.tokens / _JUST_NOW,
        [each.tokens / STEP for each in found],
        [_percentile(each.firsts, 0.5) for each in found],
        [_percentile(each.firsts, 0.95) for each in found],
        [_percentile(each.gaps, 0.5) for each in found],
        [_percentile(each.gaps, 0.95) for each in found],
    )


def _together(processes: Sequence[dict[int, Second]], start: int, end: int) -> Second:
    """Some seconds as one."""
    total = Second()
    for number in range(start, end):
        for each in (seconds[number] for seconds in processes if number in seconds):
            total.tokens += each.tokens
            total.firsts = [a + b for a, b in zip(total.firsts, each.firsts, strict=True)]
            total.gaps = [a + b for a, b in zip(total.gaps, each.gaps, strict=True)]
    return total


def _percentile(bins: _Bins, share: float) -> float | None:
    """Milliseconds that so many values do not exceed, to a hundredth: the middle of their bin."""
    sums = list(accumulate(bins))
    if not sums[-1]:
        return None
    index = bisect_left(sums, share * sums[-1])
    return round(1000 * _SHORTEST * _RATIO ** (index - 0.5), 2)
