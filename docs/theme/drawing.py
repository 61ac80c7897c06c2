"""A few shapes for the pictures of the documentation, in colours that a page may change."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

COLOURS = ("blue", "orange", "green", "violet")
"""Of what stands beside each other, in this order."""

_STYLE = """
.picture { --ink: #1c2733; --soft: #5b6875; --line: #b8c2cc; --paper: #f4f6f8; --blue: #2f78c4;
  --orange: #d9772b; --green: #3a9a5f; --violet: #8a5cc2; --pale: #dfe5ea; --on: #ffffff }
@media (prefers-color-scheme: dark) { .picture { --ink: #e3e9ef; --soft: #9fb0c0; --line: #4a5b6c;
  --paper: #1d2935; --blue: #5c9fe0; --orange: #e8954f; --green: #5bb980; --violet: #ac84dd;
  --pale: #33424f; --on: #0e1620 } }
.picture text { fill: var(--ink); font: 13px system-ui, "Helvetica Neue", Arial, sans-serif }
.picture .soft { fill: var(--soft) } .picture .on { fill: var(--on) }
.picture .title { font-weight: 600 } .picture .small { font-size: 11px }
.picture .mono { font-family: ui-monospace, Menlo, Consolas, monospace }
.picture .paper { fill: var(--paper) } .picture .pale { fill: var(--pale) }
.picture .blue { fill: var(--blue) } .picture .orange { fill: var(--orange) }
.picture .green { fill: var(--green) } .picture .violet { fill: var(--violet) }
.picture .empty { fill: none; stroke: var(--line); stroke-dasharray: 3 3 }
.picture .edge { stroke: var(--line); fill: none }
.picture .arrow { stroke: var(--soft); stroke-width: 1.4; fill: none }
.picture .tip { fill: var(--soft) }
"""


@dataclass
class Drawing:
    """A picture that grows by one shape a call; all lengths are in its own units.

    Attributes:
        title: what is to be seen, for readers who see no picture.
    """

    width: int
    height: int
    title: str
    _shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str, r: float = 3) -> None:
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{r:g}" '
            f'class="{kind}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text whose base is at `y`."""
        css = f' class="{kind}"' if kind else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{css}>{escape(text)}</text>'
        )

    def labelled(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        label: str,
        css: str = "on",
    ) -> None:
        """A box with a line in its middle."""
        self.box(x, y, width, height, kind)
        self.text(x + width / 2, y + height / 2 + 4.5, label, css, "middle")

    def line(self, *points: tuple[float, float], kind: str = "edge") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(f'<polyline points="{path}" class="{kind}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line with a tip at its last point, the last part being level or upright."""
        self.line(*points, kind="arrow")
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        side = (4 * dy, 4 * dx)
        base = (x - 7 * dx, y - 7 * dy)
        corners = [(x, y), (base[0] + side[0], base[1] + side[1])]
        corners.append((base[0] - side[0], base[1] - side[1]))
        path = " ".join(f"{a:g},{b:g}" for a, b in corners)
        self._shapes.append(f'<polygon points="{path}" class="tip"/>')

    def legend(self, x: float, y: float, entries: dict[str, str], step: float) -> None:
        """Small boxes with what they stand for, in a row."""
        for number, (kind, meaning) in enumerate(entries.items()):
            left = x + number * step
            self.box(left, y - 10, 12, 12, kind, 2)
            self.text(left + 18, y, meaning, "small soft")

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        view = f'viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" {size} {view} role="img">'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, f"<style>{_STYLE}</style>", *self._shapes, "</svg>\n"])
