"""How long steps take, how full they are and what the host does for them, counted as they pass."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paged.runtime.messages import Distribution, StepStats

if TYPE_CHECKING:  # here JAX is not needed
    from paged.runtime.runner import InFlight, StepResult

STEP_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2),
    *(0.5, 1.0, 5.0),
)
"""Seconds of a step."""
HOST_BOUNDS = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01),
    *(0.02, 0.05, 0.1),
)
"""Seconds of the host in a step."""
TOKEN_BOUNDS = (1, *(8 * 2**power for power in range(12)))
"""Tokens of a step: 1, 8, 16, ... 16,384."""


class Counts:
    """Values counted up to each bound, and beyond them all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def distribution(self) -> Distribution:
        """As of now."""
        return Distribution(tuple(self._counts), self._total)


class StepRecord:
    """What the engine core tells of its steps; its thread alone uses it.

    A step's time is that from when the device could begin (it was launched, and the one before was
    done) until its tokens were here. The host's is what a call of `EngineCore.step` takes beside
    waiting for the device.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, Counts] = {}
        self._host_seconds = Counts(HOST_BOUNDS)
        self._num_tokens = Counts(TOKEN_BOUNDS)
        self._num_places = 0
        self._began = self._waited = self._done = 0.0
        self._has_launched = False

    def begin(self) -> None:
        """A call of `EngineCore.step` begins."""
        self._began, self._waited, self._has_launched = time.perf_counter(), 0.0, False

    def end(self) -> None:
        """And ends."""
        if self._has_launched:
            self._host_seconds.add(time.perf_counter() - self._began - self._waited)

    def launched(self, step: InFlight) -> None:
        """A step was enqueued."""
        self._has_launched = True
        self._num_tokens.add(step.plan.num_tokens)
        self._num_places += step.bucket.num_tokens

    def read(self, step: InFlight) -> StepResult:
        """Wait for a step. Raises what the device raised."""
        start = time.perf_counter()
        result = step.read()
        now = time.perf_counter()
        name = step.bucket.name
        if name not in self._seconds:
            self._seconds[name] = Counts(STEP_BOUNDS)
        self._seconds[name].add(now - max(step.launch_time, self._done))
        self._waited += now - start
        self._done = now
        return result

    def stats(self) -> StepStats:
        """As of now."""
        return StepStats(
            seconds={name: counts.distribution() for name, counts in self._seconds.items()},
            host_seconds=self._host_seconds.distribution(),
            num_tokens=self._num_tokens.distribution(),
            num_places=self._num_places,
        )
