"""Results as one HTML page that needs nothing else: tables, and plots drawn in SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from paged.runtime.bench.html_page import card, gallery, legend, page
from paged.runtime.bench.plots import Axis, Series, plot
from paged.runtime.bench.results import METRICS, BenchResult, RunResult, StepTime, Times
from paged.runtime.bench.tables import (
    TITLES,
    steps_table,
    throughput_table,
    times_tables,
)

Named = Sequence[tuple[str, BenchResult]]
_SPREAD = 30  # from so many times the smallest on, a logarithmic axis shows more
_RATE = "output tokens/s"


def html_report(results: Named) -> str:
    """A page about some results.

    Args:
        results: each with the name that tells it from the others; a single one may have "".
    """
    runs = named_runs(results)
    body = [_header(results)]
    if runs:
        body += [_run_section(runs)]
    steps = [(name, result) for name, result in results if result.steps]
    if steps:
        body += [_step_section(steps)]
    return page(_title(results), "".join(body))


def named_runs(results: Named) -> list[tuple[str, RunResult]]:
    """The runs of all results, each under a name of its own."""
    named = []
    for name, result in results:
        alone = name and len(result.runs) == 1
        for run in result.runs:
            named.append((name if alone else f"{name}: {run.name}" if name else run.name, run))
    return named


def _title(results: Named) -> str:
    commands = " and ".join(dict.fromkeys(result.command for _, result in results))
    return f"paged bench {commands}"


def _header(results: Named) -> str:
    lines = []
    for name, result in results:
        device = f" on {result.device}" if result.device else ""
        about = f"{result.command}: {result.model}{device}, {result.date}"
        lines.append(f"<p>{escape(f'{name}: {about}' if name else about)}</p>")
    return f"<header><h1>{escape(_title(results))}</h1>{''.join(lines)}</header>"


def _run_section(runs: Sequence[tuple[str, RunResult]]) -> str:
    trades = len(runs) > 2
    parts = [
        card(throughput_table(runs), marked=True),
        *(["<h2>Throughput against latency</h2>", gallery(_trade_off(runs))] if trades else []),
        "<h2>Over the run</h2>",
        gallery(_over_time(runs)),
        "<h2>How times are spread</h2>",
        gallery(_spreads([(name, run.times) for name, run in runs])),
        *_kind_sections(runs),
        "<h2>Figures</h2>",
        *(card(table) for table in times_tables(runs)),
    ]
    settings = "".join(
        f"<p>{escape(name)}: {escape(', '.join(f'{k} {v}' for k, v in run.settings.items()))}</p>"
        for name, run in runs
        if run.settings
    )
    return "".join(parts) + (f"<h2>Settings</h2>{settings}" if settings else "")


def _over_time(runs: Sequence[tuple[str, RunResult]]) -> Iterator[str]:
    rates, flight = [], []
    for style, (name, run) in enumerate(runs):
        if run.timeline is None:
            continue
        line = run.timeline
        at = [line.seconds * (piece + 0.5) for piece in range(len(line.in_flight))]
        rates.append(Series(name, at, line.output_tokens_per_second, style))
        flight.append(Series(name, at, line.in_flight, style))
    yield plot("Output tokens per second", rates, Axis("seconds"), Axis("tokens/s"))
    yield plot("Requests in flight", flight, Axis("seconds"), Axis("requests"))


def _spreads(runs: Sequence[tuple[str, Mapping[str, Times]]]) -> Iterator[str]:
    for metric in METRICS:
        series = [
            Series(name, times[metric].curve, range(101), style)
            for style, (name, times) in enumerate(runs)
            if metric in times
        ]
        values = [value for each in series for value in each.x if value > 0]
        log = bool(values) and max(values) > _SPREAD * min(values)
        of_what = "% of gaps" if metric == "itl" else "% of requests"
        yield plot(TITLES[metric], series, Axis("ms", log), Axis(of_what, top=100.0))


def _kind_sections(runs: Sequence[tuple[str, RunResult]]) -> Iterator[str]:
    for kind in dict.fromkeys(kind for _, run in runs for kind in run.kinds):
        yield f"<h2>Of {escape(kind)} requests</h2>"
        yield gallery(_spreads([(name, run.kinds.get(kind, {})) for name, run in runs]))


def _trade_off(runs: Sequence[tuple[str, RunResult]]) -> Iterator[str]:
    """Each run as a dot: more to the right is better, and lower is."""
    for metric in ("ttft", "tpot", "e2el"):
        dots = [
            Series(name, [run.output_tokens_per_second], [run.times[metric].p99], style, dots=True)
            for style, (name, run) in enumerate(runs)
            if metric in run.times
        ]
        yield plot(f"P99 of {TITLES[metric].lower()}", dots, Axis(_RATE), Axis("ms"))


def _step_section(results: Named) -> str:
    names, lines = [], []
    for name, result in results:
        for context in sorted({step.context_tokens for step in result.steps}):
            steps = [step for step in result.steps if step.context_tokens == context]
            about = f"context {context}"
            names.append(f"{name}: {about}" if name else about)
            lines.append(steps)
    parts = [legend(names), gallery(_step_plots(names, lines))]
    for name, result in results:
        ceilings = result.ceilings
        if ceilings is not None:
            parts.append(
                f"<p>{escape(name or 'The device')} reads {ceilings.bytes_per_second / 1e9:,.1f} "
                f"GB/s and multiplies {ceilings.flops_per_second / 1e9:,.1f} GFLOP/s, as measured "
                "before its steps.</p>"
            )
    parts += [card(steps_table(name or "Steps", result.steps)) for name, result in results]
    return "<h2>Compiled steps</h2>" + "".join(parts)


def _step_plots(names: Sequence[str], lines: Sequence[Sequence[StepTime]]) -> Iterator[str]:
    tokens = Axis("tokens of the step", log=True)
    for kind in ("decode", "mixed"):
        chosen = [_of_kind(steps, kind) for steps in lines]
        times = _by_tokens(names, chosen, lambda step: step.ms)
        yield plot(f"Time of a step, {kind}", times, tokens, Axis("ms", log=True))
        reads = _by_tokens(names, chosen, lambda step: 100 * step.bandwidth_fraction)
        yield plot(f"Share of bandwidth, {kind}", reads, tokens, Axis("%"))
        products = _by_tokens(names, chosen, lambda step: 100 * step.flops_fraction)
        yield plot(f"Share of matmul speed, {kind}", products, tokens, Axis("%"))


def _by_tokens(
    names: Sequence[str], lines: Sequence[Sequence[StepTime]], value: Callable[[StepTime], float]
) -> list[Series]:
    return [
        Series(name, [step.num_tokens for step in steps], list(map(value, steps)), style, dots=True)
        for style, (name, steps) in enumerate(zip(names, lines, strict=True))
    ]


def _of_kind(steps: Sequence[StepTime], kind: str) -> list[StepTime]:
    """One a bucket, that of the fewest rows, by tokens."""
    found: dict[str, StepTime] = {}
    for step in sorted(steps, key=lambda each: (each.num_tokens, -each.rows)):
        if step.bucket.startswith(kind):
            found[step.bucket] = step
    return list(found.values())
