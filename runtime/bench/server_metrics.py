"""What a server's own /metrics say of the time between two looks, by names that vLLM gave them.

Servers that have none, or other names, tell nothing. If others use the server meanwhile, what is
told is of their requests too.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from paged.runtime.bench.connection import HttpClient
from paged.runtime.bench.results import Times

_LINE = re.compile(r"^vllm:(\w+?)(?:\{(.*)\})? ([-+.\deE]+|\+?Inf|NaN)$")
_BOUND = re.compile(r'\ble="([^"]+)"')
_QUEUE = "request_queue_time_seconds"
_PATIENCE = 5.0


@dataclass(frozen=True)
class ServerMetrics:
    """Counters at one moment, or what they grew by between two; summed over their labels.

    Attributes:
        values: by name, without suffix _total.
        queued: requests that were queued up to so many seconds.
    """

    values: dict[str, float] = field(default_factory=dict)
    queued: dict[float, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ServerMetrics:
        values: dict[str, float] = defaultdict(float)
        queued: dict[float, float] = defaultdict(float)
        for name, labels, value in _samples(text):
            bound = _BOUND.search(labels)
            if name == f"{_QUEUE}_bucket" and bound:
                queued[float(bound[1])] += value
            else:
                values[name.removesuffix("_total")] += value
        return cls(dict(values), dict(sorted(queued.items())))

    def since(self, before: ServerMetrics) -> ServerMetrics:
        """What has come on top."""
        values = {name: each - before.values.get(name, 0) for name, each in self.values.items()}
        queued = {bound: each - before.queued.get(bound, 0) for bound, each in self.queued.items()}
        return ServerMetrics(values, queued)

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of prompt tokens that were found; None if none was looked up."""
        queries = self.values.get("prefix_cache_queries")
        return self.values.get("prefix_cache_hits", 0) / queries if queries else None

    def queued_at_most(self, share: float) -> float:
        """Seconds that no more were waited by this share of the requests, by a bucket's bound."""
        wanted = share * self.values[f"{_QUEUE}_count"]
        return next(bound for bound, count in self.queued.items() if count >= wanted)

    @property
    def queue_times(self) -> Times | None:
        """As near as the histogram tells: within a bucket times are taken as spread evenly."""
        count = self.values.get(f"{_QUEUE}_count", 0)
        if not count or not self.queued:
            return None
        finite = [bound for bound in self.queued if np.isfinite(bound)]
        reached = [0.0, *(self.queued[bound] for bound in finite)]
        bounds = [0.0, *finite]
        curve = 1000 * np.interp(np.linspace(0, count, 101), reached, bounds)
        mean = 1000 * self.values.get(f"{_QUEUE}_sum", 0) / count
        points = curve.round(4).tolist()
        p50, p90, p95, p99 = (points[each] for each in (50, 90, 95, 99))
        return Times(int(count), mean, float(curve.std()), p50, p90, p95, p99, tuple(points))


async def look(http: HttpClient) -> ServerMetrics:
    """The counters now; none where the server does not tell them."""
    try:
        async with asyncio.timeout(_PATIENCE):
            response = await http.get("/metrics")
    except OSError:  # a timeout is one
        return ServerMetrics()
    text = response.body.decode(errors="replace") if response.status == 200 else ""
    return ServerMetrics.parse(text)


def metric_lines(metrics: ServerMetrics) -> Iterator[str]:
    """For people; nothing if nothing is told."""
    told = []
    if (rate := metrics.prefix_hit_rate) is not None:
        told.append(f"prefix cache hits {rate:.1%}")
    if "num_preemptions" in metrics.values:
        told.append(f"{metrics.values['num_preemptions']:.0f} preemptions")
    if (times := metrics.queue_times) is not None:
        p50, p99 = (1000 * metrics.queued_at_most(share) for share in (0.5, 0.99))
        told.append(
            f"queue time mean {times.mean:.1f} ms, at most {p50:.0f} for half of the requests and "
            f"{p99:.0f} for 99 %"
        )
    if told:
        yield f"By the server's /metrics: {', '.join(told)}."


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        if found := _LINE.match(line):
            yield found[1], found[2] or "", float(found[3])
