"""From the records of a run's requests to what is reported of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from paged.runtime.bench.metrics import RequestRecord, ServeSummary, seconds_of
from paged.runtime.bench.results import (
    METRICS,
    EngineReport,
    RequestTimes,
    RunResult,
    Timeline,
    Times,
    Value,
)

_PIECES = 60  # of a timeline: a point every few pixels of a plot


def run_result(
    summary: ServeSummary,
    name: str,
    *,
    settings: Mapping[str, Value] | None = None,
    engine: EngineReport | None = None,
) -> RunResult:
    """A run, told under this name."""
    done = summary.completed
    kinds = sorted({record.kind for record in done} - {""})
    return RunResult(
        name=name,
        duration=summary.duration,
        num_completed=len(done),
        num_failed=summary.failures.total(),
        num_input_tokens=summary.num_input_tokens,
        num_output_tokens=summary.num_output_tokens,
        requests_per_second=summary.request_throughput,
        output_tokens_per_second=summary.output_throughput,
        total_tokens_per_second=summary.total_token_throughput,
        goodput=summary.request_goodput,
        goals=dict(summary.goals),
        times=times_of(done),
        kinds={kind: times_of(each for each in done if each.kind == kind) for kind in kinds},
        settings=dict(settings or {}),
        engine=engine,
        timeline=_timeline(done, summary.duration),
        requests=_requests(summary.records),
    )


def times_of(records: Iterable[RequestRecord]) -> dict[str, Times]:
    """How each metric is spread; without those that nobody saw."""
    records = list(records)
    spread = {metric: Times.of(seconds_of(records, metric)) for metric in METRICS}
    return {metric: times for metric, times in spread.items() if times is not None}


def _requests(records: Sequence[RequestRecord]) -> tuple[RequestTimes, ...]:
    begin = min((record.start for record in records), default=0.0)
    return tuple(
        RequestTimes(
            start=round(record.start - begin, 6),
            num_input_tokens=record.num_input_tokens,
            num_output_tokens=record.num_output_tokens,
            ttft=round(record.ttft, 6),
            tpot=round(record.tpot, 6),
            e2el=round(record.e2el, 6),
            queue=None if record.queue is None else round(record.queue, 6),
            kind=record.kind,
            error=record.error,
        )
        for record in records
    )


def _timeline(records: Sequence[RequestRecord], duration: float) -> Timeline | None:
    if not records:
        return None
    begin, width = min(record.start for record in records), duration / _PIECES
    edges = np.linspace(0, duration, _PIECES + 1)
    chunks = [(at - begin, _share(record)) for record in records for at in record.chunk_times]
    at, tokens = np.array(chunks).T
    rates = np.histogram(at, edges, weights=tokens)[0] / width
    starts = np.array([record.start - begin for record in records])
    ends = starts + [record.e2el for record in records]
    inside = np.minimum.outer(edges[1:], ends) - np.maximum.outer(edges[:-1], starts)
    in_flight = np.maximum(inside, 0).sum(axis=1) / width
    return Timeline(width, tuple(rates.round(3).tolist()), tuple(in_flight.round(3).tolist()))


def _share(record: RequestRecord) -> float:
    """Tokens in each chunk, as if they were spread evenly."""
    return record.num_output_tokens / len(record.chunk_times)
