"""`paged bench --compare A.json B.json`: what the second run does better or worse."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from paged.runtime.bench.html_report import html_report
from paged.runtime.bench.publish import write_text
from paged.runtime.bench.results import METRICS, BenchResult, RunResult, read_result
from paged.runtime.bench.tables import Table, milliseconds
from paged.runtime.errors import ConfigError

Pair = tuple[float | None, float | None]


def run_compare(paths: Sequence[str], html: str | None) -> int:
    """Print what differs, and write the page if one is named; returns 0.

    Raises:
        ConfigError: a file is no result, or the two have nothing in common.
    """
    first, second = (read_result(Path(path).expanduser()) for path in paths)
    names = _names(paths, (first, second))
    if not any(True for _ in compare_tables(names, first, second)):
        held = " and ".join(map(_what_it_holds, names, (first, second)))
        raise ConfigError(f"Nothing can be compared: {held}")
    for line in compare_lines(names, first, second):
        sys.stdout.write(line + "\n")
    if html:
        write_text(Path(html), html_report(list(zip(names, (first, second), strict=True))))
    return 0


def compare_lines(names: Sequence[str], first: BenchResult, second: BenchResult) -> Iterator[str]:
    """Figure by figure, run by run; steps by their times."""
    for name, result in zip(names, (first, second), strict=True):
        device = f" on {result.device}" if result.device else ""
        yield f"{name}: {result.command} of {result.model}{device}, {result.date}"
    for table in compare_tables(names, first, second):
        yield ""
        yield from table.lines()


def compare_tables(
    names: Sequence[str], first: BenchResult, second: BenchResult
) -> Iterator[Table]:
    """A table for each run that both have, under its name or as the only one of each."""
    for title, one, other in _pairs(first, second):
        rows = tuple(
            _row(name, pair) for name, pair in _figures(one, other) if pair != (None, None)
        )
        yield Table(title, ("figure", *names, "change"), rows)
    steps = {(step.bucket, step.rows, step.context_tokens): step.ms for step in second.steps}
    rows = tuple(
        _row(f"{step.bucket}, {step.rows} rows, context {step.context_tokens}", (step.ms, after))
        for step in first.steps
        if (after := steps.get((step.bucket, step.rows, step.context_tokens))) is not None
    )
    if rows:
        yield Table("Milliseconds of a step", ("step", *names, "change"), rows)


def _what_it_holds(name: str, result: BenchResult) -> str:
    runs = ", ".join(run.name for run in result.runs) or "none"
    return f"{name} is of {result.command}, with {len(result.steps)} steps and the runs {runs}"


def _names(paths: Sequence[str], results: Sequence[BenchResult]) -> list[str]:
    """The labels of the results, else their files' names, else their paths."""
    labels = [result.label or Path(path).stem for path, result in zip(paths, results, strict=True)]
    return labels if len(set(labels)) == len(labels) else list(paths)


def _pairs(first: BenchResult, second: BenchResult) -> Iterator[tuple[str, RunResult, RunResult]]:
    if len(first.runs) == len(second.runs) == 1:
        yield "", first.runs[0], second.runs[0]
        return
    others = {run.name: run for run in second.runs}
    for run in first.runs:
        if run.name in others:
            yield run.name, run, others[run.name]


def _figures(before: RunResult, after: RunResult) -> Iterator[tuple[str, Pair]]:
    yield "failed requests", (before.num_failed, after.num_failed)
    yield "requests/s", (before.requests_per_second, after.requests_per_second)
    yield "output tokens/s", (before.output_tokens_per_second, after.output_tokens_per_second)
    yield "total tokens/s", (before.total_tokens_per_second, after.total_tokens_per_second)
    yield "good requests/s", (before.goodput, after.goodput)
    for metric in METRICS:
        spreads = before.times.get(metric), after.times.get(metric)
        for name in ("mean", "p50", "p90", "p95", "p99"):
            one, two = (None if each is None else getattr(each, name) for each in spreads)
            shown = name if name == "mean" else name.upper()
            yield f"{metric.upper()} {shown}, ms", (one, two)


def _row(name: str, pair: Pair) -> tuple[str, ...]:
    before, after = pair
    cells = ("-" if value is None else _number(value) for value in pair)
    change = f"{after / before - 1:+.1%}" if before and after is not None else ""
    return name, *cells, change


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else milliseconds(value)
