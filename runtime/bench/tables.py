"""Results as tables: the same rows for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paged.runtime.bench.results import METRICS, RunResult, StepTime, Times

TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
    "queue": "Queue time",
}


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: what stands above it; "" for nothing.
        head: the columns, of which the first names the row.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> Iterator[str]:
        """For a terminal: the first column to the left, numbers to the right."""
        whole = (self.head, *self.rows)
        widths = [max(len(row[column]) for row in whole) for column in range(len(self.head))]
        if self.title:
            yield self.title
        for row in whole:
            first, *others = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            numbers = (cell.strip().rjust(len(cell)) for cell in others)
            yield "  ".join((first, *numbers)).rstrip()


def throughput_table(runs: Sequence[tuple[str, RunResult]]) -> Table:
    """What came of each run, by name."""
    columns: dict[str, Callable[[RunResult], str]] = {
        "done": lambda run: str(run.num_completed),
        "failed": lambda run: str(run.num_failed),
        "seconds": lambda run: f"{run.duration:.2f}",
        "requests/s": lambda run: f"{run.requests_per_second:.2f}",
        "output tokens/s": lambda run: f"{run.output_tokens_per_second:,.1f}",
        "total tokens/s": lambda run: f"{run.total_tokens_per_second:,.1f}",
    }
    if any(run.goals for _, run in runs):
        columns["good requests/s"] = lambda run: "" if run.goodput is None else f"{run.goodput:.2f}"
    if any(run.engine for _, run in runs):
        columns["prefix hits"] = lambda run: (
            f"{run.engine.prefix_hit_rate:.1%}" if run.engine else ""
        )
        columns["preemptions"] = lambda run: str(run.engine.num_preemptions) if run.engine else ""
    rows = tuple((name, *(show(run) for show in columns.values())) for name, run in runs)
    return Table("Throughput", ("run", *columns), rows)


def times_tables(runs: Sequence[tuple[str, RunResult]]) -> Iterator[Table]:
    """How each time is spread, run by run, and in each kind of request where there are kinds."""
    for metric in METRICS:
        rows: list[tuple[str, ...]] = []
        for name, run in runs:
            rows += _times_rows(name, metric, run.times)
            for kind, times in run.kinds.items():
                rows += _times_rows(f"{name}, {kind}", metric, times)
        if rows:
            head = ("run", "mean", "P50", "P90", "P95", "P99")
            yield Table(f"{TITLES[metric]} ({metric.upper()}), ms", head, tuple(rows))


def steps_table(name: str, steps: Sequence[StepTime]) -> Table:
    """Each compiled step."""
    head = (
        *("step", "rows", "context", "ms", "tokens/s", "MB", "GFLOP"),
        *("of bandwidth", "of matmul"),
    )
    return Table(name, head, tuple(_step_row(step) for step in steps))


def run_lines(runs: Sequence[RunResult]) -> Iterator[str]:
    """All tables of some runs, for a terminal."""
    named = [(run.name, run) for run in runs]
    for number, table in enumerate((throughput_table(named), *times_tables(named))):
        if number:
            yield ""
        yield from table.lines()


def milliseconds(value: float) -> str:
    """With as many digits as matter."""
    digits = 0 if value >= 1000 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def _times_rows(name: str, metric: str, times: Mapping[str, Times]) -> Iterator[tuple[str, ...]]:
    spread = times.get(metric)
    if spread is not None:
        numbers = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)
        yield name, *map(milliseconds, numbers)


def _step_row(step: StepTime) -> tuple[str, ...]:
    return (
        step.bucket,
        str(step.rows),
        str(step.context_tokens),
        f"{step.ms:.3f}",
        f"{1e3 * step.num_tokens / step.ms:,.0f}",
        f"{step.bytes / 1e6:,.1f}",
        f"{step.flops / 1e9:,.2f}",
        f"{step.bandwidth_fraction:.1%}",
        f"{step.flops_fraction:.1%}",
    )
