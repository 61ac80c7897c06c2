"""The plots of `docs/fleet.md`, drawn from the tables of that page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from docs.theme.drawing import COLOURS, Drawing

PAGE = Path(__file__).parents[1] / "fleet.md"
_BASE, _TALLEST = 210, 140  # where bars stand, and how long the longest is


@dataclass(frozen=True)
class Panel:
    """Bars in groups.

    Attributes:
        groups: a label below each group, and its values.
        series: what the bars of a group are, in the order of its values.
    """

    title: str
    unit: str
    groups: Mapping[str, Sequence[float]]
    series: Sequence[str]


def tables(text: str) -> Iterator[list[list[str]]]:
    """The cells of each table of a page, its head first and the line below that left out."""
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            yield [rows[0], *rows[2:]]
            rows = []


def table(first: str) -> list[list[str]]:
    """The table of the page whose first cell begins so."""
    [found] = [each for each in tables(PAGE.read_text("utf-8")) if each[0][0].startswith(first)]
    return found


def value(cell: str) -> float:
    """The number that a cell begins with."""
    return float(cell.split()[0].replace(",", ""))


def draw(drawing: Drawing, panel: Panel, left: float, width: float) -> None:
    """Bars with their values on them, in proportion to the longest of the panel."""
    drawing.text(left, 26, panel.title, "title")
    drawing.text(left, 43, panel.unit, "small soft")
    meaning = dict(zip(COLOURS[: len(panel.series)], panel.series, strict=True))
    most = max(max(values) for values in panel.groups.values())
    share = width / len(panel.groups)
    bar = (share - 14) / len(panel.series)
    for number, (label, values) in enumerate(panel.groups.items()):
        start = left + number * share
        drawing.text(start + (share - 14) / 2, _BASE + 17, label, "small soft", "middle")
        for place, (size, kind) in enumerate(zip(values, meaning, strict=True)):
            height, x = size / most * _TALLEST, start + place * bar
            drawing.box(x + 1, _BASE - height, bar - 2, height, kind, 2)
            drawing.text(x + bar / 2, _BASE - height - 4, f"{size:.3g}", "small", "middle")
    drawing.line((left, _BASE), (left + width - 14, _BASE))
    drawing.legend(left, _BASE + 42, meaning, min(110, (width - 14) / len(meaning)))


def side_by_side(title: str, *panels: Panel) -> Drawing:
    """Panels in a row, the wider the more bars they have."""
    drawing = Drawing(720, _BASE + 60, title)
    bars = [len(panel.groups) * (len(panel.series) + 1.5) for panel in panels]
    left, room = 20.0, 680 - 30 * (len(panels) - 1)
    for panel, number in zip(panels, bars, strict=True):
        width = room * number / sum(bars)
        draw(drawing, panel, left, width)
        left += width + 30
    return drawing


def fleet_steps() -> Drawing:
    """What a step takes on more GPUs, as measured and as predicted."""
    _, *measured = table("rows ")
    head, *planned = table("Llama-3.1-70B")
    small = {row: (value(one), value(two)) for row, one, two, _ in measured}
    large = {
        rows: [value(line[column]) for line in planned]
        for column, rows in enumerate(head[1:-1], start=1)
    }
    return side_by_side(
        "A decode step on one GPU and on several",
        Panel("8B in bfloat16, measured", "ms a decode step", small, ("one GPU", "two")),
        Panel("70B in fp8, predicted", "ms a decode step", large, [line[0] for line in planned]),
    )


def fleet_streams() -> Drawing:
    """What streams feel of long prompts beside them."""
    _, one, two = table("engines")
    columns = zip(one[2].split(" / "), two[2].split(" / "), strict=True)
    names = ("P50", "P99", "most")
    between = {name: list(map(value, both)) for name, both in zip(names, columns, strict=True)}
    first = {"median": (value(one[3]), value(two[3]))}
    return side_by_side(
        "Streams beside long prompts, which the same engine or another one computes",
        Panel("Between two tokens of a stream", "ms", between, ("one engine", "two")),
        Panel("First token", "of a long prompt, seconds", first, ("one", "two")),
    )


def fleet_routing() -> Drawing:
    """What routing by prefix gives agents, by replicas."""
    _, *lines = table("replicas")
    found = {f"{line[0]} replicas": (value(line[1]), value(line[2])) for line in lines}
    waits = {f"{line[0]} replicas": (value(line[3]), value(line[4])) for line in lines}
    series = ("by prefix", "random")
    return side_by_side(
        "Agents on several replicas, routed by prefix and at random",
        Panel("Found in caches, simulated", "% of prompts' tokens", found, series),
        Panel("First token, P99, simulated", "ms", waits, series),
    )
