"""What every page of results is made of: one style, tables and plots, and nothing from outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from paged.runtime.bench.plots import sample, style_rules
from paged.runtime.bench.tables import Table

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
.legend svg, td svg { width: 34px; height: 10px; margin-right: 7px; vertical-align: baseline }
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


def page(title: str, body: str) -> str:
    """A page of its own, light or dark as its reader's system is."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style_rules()}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def gallery(drawn: Iterable[str]) -> str:
    """Plots beside each other, as many as there is room for."""
    return f'<div class="plots">{"".join(drawn)}</div>'


def legend(names: Sequence[str]) -> str:
    """Which name has which style."""
    items = (f"<li>{sample(style)}{escape(name)}</li>" for style, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def card(table: Table, *, marked: bool = False) -> str:
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
