"""Small plots as SVG: lines over linear or logarithmic axes, coloured by the page around them.

A series has a class `s0`, `s1`, ... for its colour, and dashes and marks of its own beside it, so
that series are told apart without colours too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 36
_DASHES = ("", "6 3", "2 3", "9 3 2 3", "4 2", "1 2")
# A circle, a square, a triangle, a diamond, a cross and a wedge, around 0, 0.
_MARKS = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "m-3-3h6v6h-6z",
    "m0-4l4 7h-8z",
    "m0-4l4 4l-4 4l-4-4z",
    "m-1-4h2v3h3v2h-3v3h-2v-3h-3v-2h3z",
    "m0 4l4-7h-8z",
)
NUM_STYLES = len(_DASHES)
_MOST_TICKS = 5


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        style: which of the styles; they repeat.
        dots: mark each point, and tell its numbers under the pointer.
        line: join the points.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: int
    dots: bool = False
    line: bool = True


@dataclass(frozen=True)
class Axis:
    """What an axis says; from 0 on unless it is logarithmic, where nothing of 0 or less is drawn.

    Attributes:
        top: where it ends; None for a round number behind the largest.
    """

    label: str
    log: bool = False
    top: float | None = None


@dataclass(frozen=True)
class _Scale:
    """From numbers to places of the drawing."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.axis.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    @property
    def ticks(self) -> list[float]:
        if not self.axis.log:
            return linear_ticks(self.high)
        return log_ticks(self.low, self.high)


def plot(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """An `svg` element in a `figure`; "" if no series has a point to draw."""
    series = [each for each in (_drawable(one, x, y) for one in series) if each.x]
    if not series:
        return ""
    across = _scale(x, [value for each in series for value in each.x], _LEFT, WIDTH - _RIGHT)
    up = _scale(y, [value for each in series for value in each.y], HEIGHT - _BOTTOM, _TOP)
    drawn = "".join(_draw(each, across, up) for each in series)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{_grid(across, up)}{drawn}</svg></figure>"
    )


def sample(style: int) -> str:
    """A piece of the line that a style draws, and its mark, for a legend."""
    return f'<svg viewBox="0 0 34 10">{_polyline(style, "0,5 34,5")}{_mark(style, 17, 5)}</svg>'


def style_rules() -> str:
    """CSS: a style takes its colour from the variable --s0, --s1, ..."""
    return "".join(
        f"polyline.s{each} {{ stroke: var(--s{each}) }} path.s{each} {{ fill: var(--s{each}) }} "
        for each in range(NUM_STYLES)
    )


def short(value: float) -> str:
    """A number of three digits at most, with k, M, G or T for thousands."""
    for power, suffix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g}{suffix}"
    return f"{value:.3g}"


def linear_ticks(top: float) -> list[float]:
    """Round numbers from 0 to the top, some five of them."""
    step = _round_up(top / _MOST_TICKS, digits=(1, 2, 5, 10))
    return [step * each for each in range(int(top / step * 1.0001) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within, or 1, 2 and 5 times these where they are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1.0, 2.0, 5.0) if last - first <= 2 else (1.0,)
    found = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
    return [each for each in found if low * 0.999 <= each <= high * 1.001]


def _drawable(series: Series, x: Axis, y: Axis) -> Series:
    """Its points that the axes can show."""
    points = [
        (at, value)
        for at, value in zip(series.x, series.y, strict=True)
        if math.isfinite(at) and math.isfinite(value)
        if (at > 0 or not x.log) and (value > 0 or not y.log)
    ]
    places, values = ([point[part] for point in points] for part in (0, 1))
    return Series(series.name, places, values, series.style, series.dots, series.line)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    largest = max(values) if axis.top is None else axis.top
    if not axis.log:
        return _Scale(axis, 0.0, axis.top or _round_up(largest or 1.0), start, end)
    low, high = _round_down(min(values)), _round_up(largest)
    return _Scale(axis, low, high if high > low else low * 10, start, end)


def _round_up(value: float, digits: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 10)) -> float:
    """One of these digits times a power of ten, at least as large."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in digits if each * power >= value * 0.999)


def _round_down(value: float) -> float:
    """1, 2 or 5 times a power of ten, at most as large."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (5, 2, 1, 0.5) if each * power <= value * 1.001)


def _grid(across: _Scale, up: _Scale) -> str:
    """Lines, numbers and labels."""
    bottom, left, right = HEIGHT - _BOTTOM, _LEFT, WIDTH - _RIGHT
    parts = []
    for value in up.ticks:
        y = up.at(value)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        parts.append(_text(left - 5, y + 4, short(value), "end"))
    for value in across.ticks:
        x = across.at(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
        parts.append(_text(x, bottom + 14, short(value), "middle"))
    parts.append(_text((left + right) / 2, HEIGHT - 5, across.axis.label, "middle"))
    parts.append(
        f'<text transform="translate(11 {(bottom + _TOP) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(up.axis.label)}</text>'
    )
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _draw(series: Series, across: _Scale, up: _Scale) -> str:
    places = [
        (across.at(x), min(max(up.at(y), _TOP), HEIGHT - _BOTTOM))
        for x, y in zip(series.x, series.y, strict=True)
    ]
    style = series.style % NUM_STYLES
    parts = []
    if series.line and len(places) > 1:
        parts.append(_polyline(style, " ".join(f"{x:.1f},{y:.1f}" for x, y in places)))
    if series.dots or len(places) == 1:
        for (x, y), at, value in zip(places, series.x, series.y, strict=True):
            told = escape(f"{series.name}: {short(at)}, {short(value)}")
            parts.append(_mark(style, x, y, told))
    return "".join(parts)


def _polyline(style: int, points: str) -> str:
    style %= NUM_STYLES
    dash = f' stroke-dasharray="{_DASHES[style]}"' if _DASHES[style] else ""
    return f'<polyline class="s{style}" points="{points}"{dash}/>'


def _mark(style: int, x: float, y: float, told: str = "") -> str:
    style %= NUM_STYLES
    title = f"<title>{told}</title>" if told else ""
    return f'<path class="s{style}" d="M{x:.1f} {y:.1f}{_MARKS[style]}">{title}</path>'
