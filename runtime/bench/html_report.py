"""Results as one HTML page that needs nothing else: tables, and plots drawn in SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from paged.runtime.bench.plots import Axis, Series, plot, sample, style_rules
from paged.runtime.bench.results import METRICS, BenchResult, RunResult, StepTime, Times
from paged.runtime.bench.tables import (
    TITLES,
    Table,
    steps_table,
    throughput_table,
    times_tables,
)

Named = Sequence[tuple[str, BenchResult]]
_SPREAD = 30  # from so many times the smallest on, a logarithmic axis shows more
_RATE = "output tokens/s"

_STYLE = """
:root { color-scheme: light dark; --ground: #f6f6f3; --card: #fff; --line: #e4e4df; --text: #22272b;
  --quiet: #666e74; --s0: #2f7a76; --s1: #c0782a; --s2: #4f74b3; --s3: #a8493f; --s4: #7b5fa3;
  --s5: #5d6b2f }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --card: #1b1f23; --line: #2b3136;
  --text: #e4e7e8; --quiet: #98a1a7; --s0: #58b5ae; --s1: #e2a65a; --s2: #86a9df; --s3: #e58479;
  --s4: #b79ae0; --s5: #b3c26a } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1240px; padding: 20px 20px 40px; background: var(--ground);
  color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums }
h1 { font-size: 20px; margin: 0 }
h2 { font-size: 16px; margin: 28px 0 8px }
p { margin: 4px 0; color: var(--quiet); overflow-wrap: anywhere }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 12px 0; padding: 0;
  list-style: none; font-size: 14px }
.legend svg, td svg { width: 26px; height: 10px; margin-right: 7px; vertical-align: baseline }
.plots { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)) }
figure, .card { margin: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 10px 12px }
figcaption { font-size: 14px; font-weight: 600; margin-bottom: 4px }
figure svg { display: block; width: 100%; height: auto }
svg text { fill: var(--quiet); font-size: 11px }
.grid { stroke: var(--line); fill: none }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round }
.card { overflow-x: auto; margin-bottom: 14px }
table { border-collapse: collapse; font-size: 14px; width: 100% }
caption { text-align: left; font-weight: 600; padding-bottom: 4px }
th, td { padding: 3px 0 3px 16px; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0;
  background: var(--card) }
th { color: var(--quiet); font-weight: 500; border-bottom: 1px solid var(--line) }
"""


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
    title = escape(_title(results))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}{style_rules()}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


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
        _table(throughput_table(runs), marked=True),
        *(["<h2>Throughput against latency</h2>", _plots(_trade_off(runs))] if trades else []),
        "<h2>Over the run</h2>",
        _plots(_over_time(runs)),
        "<h2>How times are spread</h2>",
        _plots(_spreads([(name, run.times) for name, run in runs])),
        *_kind_sections(runs),
        "<h2>Figures</h2>",
        *(_table(table) for table in times_tables(runs)),
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
        yield _plots(_spreads([(name, run.kinds.get(kind, {})) for name, run in runs]))


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
    parts = [_legend(names), _plots(_step_plots(names, lines))]
    for name, result in results:
        ceilings = result.ceilings
        if ceilings is not None:
            parts.append(
                f"<p>{escape(name or 'The device')} reads {ceilings.bytes_per_second / 1e9:,.1f} "
                f"GB/s and multiplies {ceilings.flops_per_second / 1e9:,.1f} GFLOP/s, as measured "
                "before its steps.</p>"
            )
    parts += [_table(steps_table(name or "Steps", result.steps)) for name, result in results]
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


def _plots(drawn: Iterator[str]) -> str:
    return f'<div class="plots">{"".join(drawn)}</div>'


def _legend(names: Sequence[str]) -> str:
    items = (f"<li>{sample(style)}{escape(name)}</li>" for style, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(table: Table, *, marked: bool = False) -> str:
    """A card with a table, its rows marked with their lines if they are runs."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = []
    for style, (name, *cells) in enumerate(table.rows):
        first = f"<td>{sample(style) if marked else ''}{escape(name)}</td>"
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr>{first}{rest}</tr>")
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    return (
        f'<div class="card"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
