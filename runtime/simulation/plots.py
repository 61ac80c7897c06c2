"""Charts of simulated fleets, as SVG that needs nothing else, and the page that shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from paged.runtime.simulation.report import Summary, head, row, what_more_buys

_WIDTH, _HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 42, 44
_COLOURS = ("#1f6feb", "#d1570a", "#2da44e", "#8250df")
_TICKS = 5
_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}"
    "pre{overflow-x:auto;font-size:12px}svg{max-width:100%;height:auto}"
)

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over one axis, from 0 up.

    Attributes:
        lines: points by name, in the order of their x.
    """

    title: str
    x_title: str
    y_title: str
    lines: dict[str, Points]

    def svg(self, x: int = 0, y: int = 0) -> str:
        """As a group that is moved to a place."""
        return f'<g transform="translate({x},{y})">{"".join(self._parts())}</g>'

    def _parts(self) -> Iterator[str]:
        points = [point for line in self.lines.values() for point in line]
        low, high = min(x for x, _ in points), max(x for x, _ in points)
        levels = _ticks(0.0, max(y for _, y in points))
        width = (high - low) or 1.0

        def place(x: float, y: float) -> tuple[float, float]:
            across, up = (x - low) / width, y / levels[-1]
            across = _LEFT + across * (_WIDTH - _LEFT - _RIGHT)
            return across, _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

        yield _text(_LEFT, 16, self.title, "font-weight='600'")
        yield _text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, self.x_title, "text-anchor='middle'")
        yield _text(_LEFT, 32, self.y_title, "fill='#666'")
        for level in levels:
            _, y = place(low, level)
            yield f"<path d='M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}' stroke='#ddd'/>"
            yield _text(_LEFT - 6, y + 4, f"{level:,.10g}", "text-anchor='end'")
        for at in (each for each in _ticks(low, high) if low <= each <= high):
            x, y = place(at, 0.0)
            yield _text(x, y + 16, f"{at:,.10g}", "text-anchor='middle'")
        for index, (name, line) in enumerate(self.lines.items()):
            yield from _line(name, [place(*point) for point in line], index)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, some five of them, the last at `high` or beyond it."""
    rough = (high - low) / _TICKS or 1.0
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = floor(low / step)
    last = max(ceil(high / step), first + 1)
    return [round(step * each, 10) for each in range(first, last + 1)]


def charts(summaries: Sequence[Summary]) -> list[Chart]:
    """What there is to see of these runs: those over replicas need two numbers of them."""
    by_routing = {
        routing: sorted((s for s in summaries if s.routing == routing), key=lambda s: s.replicas)
        for routing in dict.fromkeys(each.routing for each in summaries)
    }
    found = []
    if all(len(runs) > 1 for runs in by_routing.values()):
        found = [
            _over_replicas(by_routing, "Throughput", "requests/s", lambda s: s.request_rate),
            _over_replicas(by_routing, "Time to first token, P99", "ms", lambda s: s.p99("ttft")),
            _over_replicas(by_routing, "Time per token, P99", "ms", lambda s: s.p99("tpot")),
            _gains(by_routing),
        ]
    for each in summaries:
        if each.sizes:
            found.append(_sizes(each))
    return found


def image(summaries: Sequence[Summary]) -> str:
    """All charts in one SVG file, two beside each other."""
    places = [(index % 2 * _WIDTH, index // 2 * _HEIGHT) for index in range(len(charts(summaries)))]
    drawn = "".join(
        chart.svg(*place) for chart, place in zip(charts(summaries), places, strict=True)
    )
    width, height = min(len(places), 2) * _WIDTH, (len(places) + 1) // 2 * _HEIGHT
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}' font-family='system-ui,sans-serif' font-size='11'>"
        f"<rect width='100%' height='100%' fill='white'/>{drawn}</svg>\n"
    )


def page(summaries: Sequence[Summary], about: Sequence[str]) -> str:
    """A page of its own: what was simulated, the charts, the table, and what more would buy."""
    table = "\n".join([head(), *map(row, summaries)])
    notes = "".join(f"<p>{escape(line)}</p>" for line in about)
    bought = "".join(f"<li>{escape(line)}</li>" for line in what_more_buys(summaries))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Simulated fleet</title>"
        f"<style>{_STYLE}</style><h1>Simulated fleet</h1>{notes}"
        f"{image(summaries) if charts(summaries) else ''}"
        f"<pre>{escape(table)}</pre><ul>{bought}</ul></html>\n"
    )


def _over_replicas(
    by_routing: dict[str, list[Summary]], title: str, unit: str, value: Callable[[Summary], float]
) -> Chart:
    lines = {
        routing: [(float(each.replicas), value(each)) for each in runs]
        for routing, runs in by_routing.items()
    }
    return Chart(title, "replicas", unit, lines)


def _gains(by_routing: dict[str, list[Summary]]) -> Chart:
    """Milliseconds off the P99, for each replica more."""
    lines = {
        routing: [
            (
                float(more.replicas),
                max(fewer.p99("ttft") - more.p99("ttft"), 0.0) / (more.replicas - fewer.replicas),
            )
            for fewer, more in pairwise(runs)
        ]
        for routing, runs in by_routing.items()
    }
    title = "What the next replica buys: P99 of the first token"
    return Chart(title, "replicas, with the next", "ms less per replica", lines)


def _sizes(each: Summary) -> Chart:
    sizes = {
        "replicas": [(seconds, float(size)) for seconds, size, _ in each.sizes],
        "open requests / 10": [(seconds, number / 10) for seconds, _, number in each.sizes],
    }
    return Chart(f"Scaling from {each.replicas}, {each.routing}", "seconds", "", sizes)


def _line(name: str, places: Points, index: int) -> Iterator[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f"<path d='M{path}' fill='none' stroke='{colour}' stroke-width='2'/>"
    if len(places) < 40:
        yield from (f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in places)
    yield _text(_WIDTH - _RIGHT - 110 * (index + 1), 32, f"\u25cf {name}", f"fill='{colour}'")


def _text(x: float, y: float, text: str, how: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {how}>{escape(text)}</text>"
