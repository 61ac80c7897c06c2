"""A Prometheus histogram that may be told of every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """Counts values up to each bound. One thread observes and is scraped: the event loop's.

    The library's own takes a lock for each of the numbers it changes, and five times as long.

    Args:
        bounds: ascending.
        also: another name under which the same is told.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
        *,
        also: str | None = None,
    ) -> None:
        self._names, self._text, self._labels = (name, also), text, labels
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)  # the last is of values beyond them all
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        buckets = cumulated(self._bounds, self._counts)
        for name in filter(None, self._names):
            family = HistogramMetricFamily(name, self._text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, self._sum)
            yield family


def cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts by bound as Prometheus has them: of all values up to each.

    Args:
        counts: one for each bound, and one for values beyond them all; or () for no values.
    """
    names = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(names, accumulate(counts or [0] * len(names)), strict=True))
