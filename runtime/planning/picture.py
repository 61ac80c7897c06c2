"""A plan drawn: the memory as a bar in the terminal, and with the steps as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from paged.runtime.memory import size_text
from paged.runtime.planning.levers import Lever
from paged.runtime.planning.planner import Plan

GLYPHS = {
    "weights": "█",
    "slot_state": "▓",
    "step_memory": "▒",
    "host_transfers": "▞",
    "kv_pages": "░",
    "unused": " ",
}
"""What stands for each share of the memory in a terminal."""
# Told apart in grey and by whoever sees no red or green, too.
_COLOURS = {
    "weights": "#30567d",
    "slot_state": "#8a6d3b",
    "step_memory": "#c98b2b",
    "host_transfers": "#7a5195",
    "kv_pages": "#7fb3d5",
    "unused": "#e3e3e3",
}
_FLOOR, _EXPECTED = "#30567d", "#7fb3d5"
_WIDTH, _MARGIN, _LINE = 760, 20, 22
_MOST_LETTERS = 70  # of a model's name, in the title
_LEFT, _RIGHT = 240, 110  # of bars: room for what they are, and for what they say


def shares_of(plan: Plan) -> dict[str, int]:
    """Bytes of a GPU by what they are for, what is not used included."""
    memory = plan.memory
    shares = {
        "weights": memory.weights,
        "slot_state": memory.state,
        "step_memory": memory.steps,
        "host_transfers": memory.transit,
        "kv_pages": memory.num_pages * memory.bytes_per_page,
    }
    return {**shares, "unused": max(plan.gpu.usable - sum(shares.values()), 0)}


def words(name: str) -> str:
    """What people are told for one of the shares."""
    return name.replace("_", " ").replace("kv", "KV")


def bar(plan: Plan, width: int) -> str:
    """The shares as so many characters, at least one for each of them."""
    shares = {name: size for name, size in shares_of(plan).items() if size}
    total, passed, end, text = sum(shares.values()), 0, 0, ""
    for after, (name, size) in zip(reversed(range(len(shares))), shares.items(), strict=True):
        passed += size
        start, end = end, min(max(round(width * passed / total), end + 1), width - after)
        text += GLYPHS[name] * (end - start)
    return text


def svg(plan: Plan, levers: Sequence[Lever]) -> str:
    """Memory, steps and levers, one below the other."""
    parts = [*_memory(plan, 40)]
    top = 150 + _LINE
    parts += _bars("Decode step, ms: floor (dark) and expected", _step_bars(plan), top)
    top += _LINE * (len(plan.batches) + 2)
    fitting = [(lever.flag, lever.plan) for lever in levers if lever.plan is not None]
    tokens = [(flag, made.kv_cache_tokens) for flag, made in (("now", plan), *fitting)]
    rows = [(flag, 0.0, float(count), f"{count:,}") for flag, count in tokens]
    parts += _bars("Tokens that the pages hold", rows, top)
    height = top + _LINE * (len(rows) + 2)
    name = plan.source.name
    if len(name) > _MOST_LETTERS:  # a path, whose end says most
        name = f"…{name[-_MOST_LETTERS:]}"
    title = f"{name} on {plan.memory.num_devices} x {plan.gpu.name}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="13" role="img">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    )
    return "\n".join([head, _text(_MARGIN, 26, title, bold=True), *parts, "</svg>\n"])


def _memory(plan: Plan, top: int) -> Iterator[str]:
    """One bar of all the memory, and below it what its colours mean."""
    shares = {name: size for name, size in shares_of(plan).items() if size}
    total, left = sum(shares.values()), float(_MARGIN)
    for name, size in shares.items():
        width = size / total * (_WIDTH - 2 * _MARGIN)
        yield _rect(left, top, width, 44, _COLOURS[name])
        left += width
    for index, (name, size) in enumerate(shares.items()):
        x, y = _MARGIN + 245 * (index % 3), top + 66 + _LINE * (index // 3)
        yield _rect(x, y - 11, 12, 12, _COLOURS[name])
        yield _text(x + 18, y, f"{words(name)} {size_text(size)}")


def _step_bars(plan: Plan) -> list[tuple[str, float, float, str]]:
    steps = [(batch, plan.decode_step(batch)) for batch in plan.batches]
    return [
        (f"batch {batch:,}", step.floor, step.expected, f"{1e3 * step.expected:.2f}")
        for batch, step in steps
    ]


def _bars(title: str, rows: Sequence[tuple[str, float, float, str]], top: float) -> Iterator[str]:
    """Rows of a name, a dark and a light length, and what stands behind."""
    yield _text(_MARGIN, top, title, bold=True)
    longest = max(light for _, _, light, _ in rows)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    for index, (name, dark, light, said) in enumerate(rows):
        y = top + _LINE * (index + 1)
        yield _text(_MARGIN, y, name)
        yield _rect(_LEFT, y - 12, scale * light, 15, _EXPECTED)
        if dark:
            yield _rect(_LEFT, y - 12, scale * dark, 15, _FLOOR)
        yield _text(_LEFT + scale * light + 6, y, said)


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _text(x: float, y: float, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{weight}>{escape(text)}</text>'
