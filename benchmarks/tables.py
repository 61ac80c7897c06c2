"""Tables of tilings as source: the modules `tuned.py` with what was measured put in."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

Entries = Sequence[tuple[int, Any]]
"""Tilings (None for XLA), each for up to so many rows or tokens."""


def short(tiling: Any) -> str:
    """A tiling as it is written: its arguments that are not the defaults."""
    if tiling is None:
        return "None"
    said = (
        f"{each.name}={getattr(tiling, each.name)}"
        for each in fields(tiling)
        if each.default is MISSING or getattr(tiling, each.name) != each.default
    )
    return f"{type(tiling).__name__}({', '.join(said)})"


def entry_lines(entries: Entries, indent: int) -> list[str]:
    """A line for each entry."""
    return [f"{' ' * indent}({most}, {short(tiling)})," for most, tiling in entries]


def with_products(name: str, table: Mapping[str, Mapping[Any, Entries]]) -> str:
    """The source of `paged.matmul.tuned` with another table of that name."""
    lines: list[str] = []
    for kind, products in table.items():
        lines.append(f'    "{kind}": {{')
        for product, entries in products.items():
            lines += [f"        {product}: (", *entry_lines(entries, 12), "        ),"]
        lines.append("    },")
    return with_table("paged.matmul.tuned", name, lines)


def with_table(module: str, name: str, lines: Iterable[str]) -> str:
    """The source of a module with other lines in the table of that name, and all else as it is."""
    source = Path(importlib.import_module(module).__file__ or "").read_text()
    head, declared, after = source.partition(f"\n{name}: ")
    annotation, opened, after = after.partition(" = {")
    _, closed, tail = after.partition("\n}\n")
    if not (declared and opened and closed):
        raise ValueError(f"{module} has no table {name} that begins and ends on lines of its own")
    return "\n".join([head + declared + annotation + " = {", *lines, "}", tail])
