"""A serving run as text and as JSON, with the labels, order and keys that vLLM's reports have."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from paged.runtime.bench.metrics import ServeSummary, Spread
from paged.runtime.bench.options import LoadOptions, ReportOptions

_WIDTH = 50
_LISTED_CAUSES = 5
_LONGEST_CAUSE = 200
_BUSY = 0.7  # share of a core from which on the client may see chunks later than they came
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def report_lines(summary: ServeSummary, load: LoadOptions, options: ReportOptions) -> Iterator[str]:
    """The report that is printed."""
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests:", len(summary.completed))
    yield _line("Failed requests:", summary.failures.total())
    if load.max_concurrency is not None:
        yield _line("Maximum request concurrency:", load.max_concurrency)
    if load.request_rate != float("inf"):
        yield _line("Request rate configured (RPS):", load.request_rate)
    yield _line("Benchmark duration (s):", summary.duration)
    yield _line("Total input tokens:", summary.num_input_tokens)
    yield _line("Total generated tokens:", summary.num_output_tokens)
    yield _line("Request throughput (req/s):", summary.request_throughput)
    if summary.request_goodput is not None:
        yield _line("Request goodput (req/s):", summary.request_goodput)
    yield _line("Output token throughput (tok/s):", summary.output_throughput)
    yield _line("Peak output token throughput (tok/s):", summary.peak_output_throughput)
    yield _line("Peak concurrent requests:", summary.peak_concurrency)
    yield _line("Total token throughput (tok/s):", summary.total_token_throughput)
    for metric in options.percentile_metrics:
        yield f"{_TITLES[metric]:-^{_WIDTH}}"
        yield from _spread_lines(metric.upper(), summary.spread(metric, options.metric_percentiles))
    yield "=" * _WIDTH
    yield from _notes(summary)


def report_json(
    summary: ServeSummary, load: LoadOptions, options: ReportOptions, about: dict[str, Any]
) -> dict[str, Any]:
    """The report that is saved.

    Args:
        about: keys that say what ran: backend, model_id and the like.
    """
    report: dict[str, Any] = {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        **about,
        "label": options.label,
        "num_prompts": len(summary.records),
        "request_rate": _rate(load),
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "duration": summary.duration,
        "completed": len(summary.completed),
        "failed": summary.failures.total(),
        "failures_by_cause": dict(summary.failures.most_common()),
        "total_input_tokens": summary.num_input_tokens,
        "total_output_tokens": summary.num_output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        "max_output_tokens_per_s": summary.peak_output_throughput,
        "max_concurrent_requests": summary.peak_concurrency,
        "client_us_per_chunk": summary.client_us_per_chunk,
        "client_load": summary.client_load,
    }
    for metric in options.percentile_metrics:
        report |= _spread_keys(metric, summary.spread(metric, options.metric_percentiles))
    if options.save_detailed:
        report |= _details(summary)
    return report | dict(options.metadata)


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"


def _spread_lines(name: str, spread: Spread) -> Iterator[str]:
    yield _line(f"Mean {name} (ms):", spread.mean)
    yield _line(f"Median {name} (ms):", spread.median)
    for percentile, value in spread.percentiles.items():
        if percentile != 50:
            yield _line(f"P{percentile:g} {name} (ms):", value)


def _spread_keys(metric: str, spread: Spread) -> dict[str, float]:
    keys = {
        f"mean_{metric}_ms": spread.mean,
        f"median_{metric}_ms": spread.median,
        f"std_{metric}_ms": spread.std,
    }
    return keys | {f"p{each:g}_{metric}_ms": value for each, value in spread.percentiles.items()}


def _notes(summary: ServeSummary) -> Iterator[str]:
    """What the numbers alone do not say."""
    failures = summary.failures.most_common()
    if failures:
        yield "Failed requests by cause:"
    for cause, times in failures[:_LISTED_CAUSES]:
        yield f"{times:>7} x {cause[:_LONGEST_CAUSE]}"
    if len(failures) > _LISTED_CAUSES:
        yield f"        and {len(failures) - _LISTED_CAUSES} other causes"
    lumps = sum(
        record.num_output_tokens > 1 and len(record.chunk_times) == 1
        for record in summary.completed
    )
    if lumps:
        yield (
            f"{lumps} requests brought all their tokens in one chunk, as if at once: TPOT and ITL "
            "are too low."
        )
    if summary.client_seconds:
        share = f"{summary.client_us_per_chunk:.1f} us a chunk, {summary.client_load:.0%} of a core"
        held_up = ": it may have held the streams up" if summary.client_load > _BUSY else ""
        yield f"The client itself took {share}{held_up}."
    uncounted = sum(not record.counted for record in summary.completed)
    if uncounted:
        yield (
            f"The server did not count the tokens of {uncounted} requests: they were counted here, "
            "by tokenizer or, without one, by chunks."
        )


def _details(summary: ServeSummary) -> dict[str, Any]:
    records = summary.records
    begin = min(record.start for record in records)
    return {
        "input_lens": [record.num_input_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itls for record in records],
        "start_times": [record.start - begin for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def _rate(load: LoadOptions) -> float | str:
    """JSON has no infinity."""
    return "inf" if load.request_rate == float("inf") else load.request_rate
