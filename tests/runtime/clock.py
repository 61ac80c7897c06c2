"""A clock that a test sets, so that nothing depends on how busy the machine is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """In place of the module `time`: it stands still unless somebody sleeps, or it is set."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
