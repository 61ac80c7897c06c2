"""What a client saw of each request, and what that amounts to.

Times are in seconds; names ending in _ms are milliseconds. TTFT is the time to the first chunk that
holds a choice, TPOT the time per output token after the first, ITL the gap between two chunks, E2EL
the time to the last chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np


@dataclass(kw_only=True)
class RequestRecord:
    """One request as its client saw it.

    Attributes:
        start: when it was sent, on the clock of `time.perf_counter`.
        num_input_tokens, num_output_tokens: as the server counted them.
        chunk_times: when each chunk that holds a choice came, same clock.
        text: what was generated.
        counted: the server told its number of output tokens.
        error: why it failed; None if it did not.
        queue: seconds until its prompt was begun; None where only the server knows.
        kind: the group that it belongs to.
    """

    start: float
    num_input_tokens: int
    num_output_tokens: int = 0
    chunk_times: list[float] = field(default_factory=list)
    text: str = ""
    counted: bool = False
    error: str | None = None
    queue: float | None = None
    kind: str = ""

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.start if self.chunk_times else 0.0

    @property
    def e2el(self) -> float:
        return self.chunk_times[-1] - self.start if self.chunk_times else 0.0

    @property
    def itls(self) -> list[float]:
        times = self.chunk_times
        return [after - before for before, after in pairwise(times)]

    @property
    def tpot(self) -> float:
        """0 for a single token, which has no time after the first."""
        following = self.num_output_tokens - 1
        return (self.e2el - self.ttft) / following if following > 0 else 0.0

    def meets(self, goals: Iterable[tuple[str, float]]) -> bool:
        """Whether each named time is at most its limit in milliseconds."""
        return all(getattr(self, name) * 1000 <= limit for name, limit in goals)


@dataclass(frozen=True)
class Spread:
    """How a time is spread over requests or chunks, in milliseconds.

    Attributes:
        percentiles: value by percentile.
    """

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Iterable[float]) -> Spread:
        """All zero if there is nothing to spread."""
        values = np.asarray(seconds if len(seconds) else [0.0]) * 1000
        return cls(
            mean=float(values.mean()),
            median=float(np.median(values)),
            std=float(values.std()),
            percentiles={each: float(np.percentile(values, each)) for each in percentiles},
        )


@dataclass(frozen=True)
class ServeSummary:
    """A serving run.

    Attributes:
        records: every request, failed ones too, in the order they were sent.
        duration: from the first request sent to the last one ended.
        goals: limits in milliseconds by name of the time.
        client_seconds: processor time that the client itself took.
    """

    records: list[RequestRecord]
    duration: float
    goals: Sequence[tuple[str, float]] = ()
    client_seconds: float = 0.0

    @cached_property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is None]

    @property
    def failures(self) -> Counter[str]:
        """Failed requests by cause."""
        return Counter(record.error for record in self.records if record.error is not None)

    @property
    def num_input_tokens(self) -> int:
        return sum(record.num_input_tokens for record in self.completed)

    @property
    def num_output_tokens(self) -> int:
        return sum(record.num_output_tokens for record in self.completed)

    @property
    def request_throughput(self) -> float:
        return len(self.completed) / self.duration

    @property
    def request_goodput(self) -> float | None:
        """Requests per second that met all goals; None without goals."""
        if not self.goals:
            return None
        return sum(record.meets(self.goals) for record in self.completed) / self.duration

    @property
    def output_throughput(self) -> float:
        return self.num_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.num_input_tokens + self.num_output_tokens) / self.duration

    @property
    def peak_output_throughput(self) -> float:
        """Most tokens that came within one second of the run.

        The tokens of a request are spread evenly over its chunks.
        """
        records = self.completed
        first = min((record.start for record in records), default=0.0)
        seconds = [int(time - first) for record in records for time in record.chunk_times]
        shares = [
            record.num_output_tokens / len(record.chunk_times)
            for record in records
            for _ in record.chunk_times
        ]
        return float(np.bincount(seconds, shares).max()) if seconds else 0.0

    @property
    def client_us_per_chunk(self) -> float:
        """Processor time that the client took for a chunk, microseconds."""
        num_chunks = sum(len(record.chunk_times) for record in self.records)
        return 1e6 * self.client_seconds / num_chunks if num_chunks else 0.0

    @property
    def client_load(self) -> float:
        """Share of one core that the client took."""
        return self.client_seconds / self.duration

    @property
    def peak_concurrency(self) -> int:
        """Most requests in flight at one moment."""
        starts = [(record.start, 1) for record in self.completed]
        ends = [(record.start + record.e2el, -1) for record in self.completed]
        running = np.cumsum([change for _, change in sorted(starts + ends)])
        return int(running.max()) if len(running) else 0

    def spread(self, metric: str, percentiles: Iterable[float]) -> Spread:
        """Of ttft, tpot, itl or e2el."""
        return Spread.of(seconds_of(self.completed, metric), percentiles)


def seconds_of(records: Iterable[RequestRecord], metric: str) -> list[float]:
    """All values of ttft, tpot, itl, e2el or queue; TPOT leaves out requests of a single token."""
    if metric == "itl":
        return [gap for record in records for gap in record.itls]
    if metric == "tpot":
        return [record.tpot for record in records if record.num_output_tokens > 1]
    values = (getattr(record, metric) for record in records)
    return [value for value in values if value is not None]
