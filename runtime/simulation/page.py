"""Simulated fleets as a page: what more replicas buy, how scaled ones went, and all figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise

from paged.runtime.bench.html_page import card, gallery, legend, page
from paged.runtime.bench.plots import Axis, Series, plot
from paged.runtime.simulation.report import Summary, by_routing, fleet_table, what_more_buys


def fleet_page(summaries: Sequence[Summary], about: Sequence[str]) -> str:
    """A page of its own.

    Args:
        about: lines on what was simulated.
    """
    lines = "".join(f"<p>{escape(line)}</p>" for line in about)
    bought = "".join(f"<p>{escape(line)}</p>" for line in what_more_buys(summaries))
    return page(
        "paged simulate",
        f"<header><h1>Simulated fleet</h1>{lines}</header>{_over_replicas(summaries)}"
        f"{_scaled(summaries)}<h2>Figures</h2>{card(fleet_table(summaries))}{bought}",
    )


def _over_replicas(summaries: Sequence[Summary]) -> str:
    """Figures by the number of replicas; "" for a single number."""
    runs = by_routing(summaries)
    if any(len(each) < 2 for each in runs.values()):
        return ""
    plots = (
        _lines(runs, "Throughput", "requests/s", lambda each: each.request_rate),
        _lines(runs, "P99 of time to first token", "ms", lambda each: each.p99("ttft")),
        _lines(runs, "P99 of time per output token", "ms", lambda each: each.p99("tpot")),
        _gains(runs),
    )
    return f"<h2>What replicas buy</h2>{legend([*runs])}{gallery(plots)}"


def _lines(
    runs: dict[str, list[Summary]], title: str, unit: str, value: Callable[[Summary], float]
) -> str:
    series = [
        Series(name, [each.replicas for each in some], list(map(value, some)), style, dots=True)
        for style, (name, some) in enumerate(runs.items())
    ]
    return plot(title, series, Axis("replicas"), Axis(unit))


def _gains(runs: dict[str, list[Summary]]) -> str:
    """Milliseconds off the P99, for each replica more."""
    series = []
    for style, (name, some) in enumerate(runs.items()):
        steps = [*pairwise(some)]
        gains = [
            max(fewer.p99("ttft") - more.p99("ttft"), 0.0) / (more.replicas - fewer.replicas)
            for fewer, more in steps
        ]
        series.append(Series(name, [more.replicas for _, more in steps], gains, style, dots=True))
    title = "What the next replica takes off the P99 of the first token"
    return plot(title, series, Axis("replicas, with the next"), Axis("ms"))


def _scaled(summaries: Sequence[Summary]) -> str:
    """How many replicas there were when; "" if their number was fixed."""
    runs = [each for each in summaries if each.sizes]
    if not runs:
        return ""
    names = [f"from {each.replicas}, {each.routing}" for each in runs]
    return f"<h2>Scaling</h2>{legend(names)}{gallery(_scaling_plots(names, runs))}"


def _scaling_plots(names: Sequence[str], runs: Sequence[Summary]) -> Iterator[str]:
    for title, unit, part in (("Replicas", "replicas", 1), ("Open requests", "requests", 2)):
        series = [
            Series(name, [at[0] for at in each.sizes], [at[part] for at in each.sizes], style)
            for style, (name, each) in enumerate(zip(names, runs, strict=True))
        ]
        yield plot(title, series, Axis("seconds"), Axis(unit))
