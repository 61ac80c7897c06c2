"""How the rows of a decode step are shared out to programs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged.attention.metadata import first_beyond

SPAN = 64
"""Positions that are read at a time: the rows of a product on Hopper."""

WHOLE = -1
"""In place of the number of a part."""


class Item(NamedTuple):
    """What one program does of a row.

    Attributes:
        row: its query.
        table: its page table.
        begin, end: the positions.
        part: where this part of the row is stored; `WHOLE` for a row that is not cut.
    """

    row: jax.Array
    table: jax.Array
    begin: jax.Array
    end: jax.Array
    part: jax.Array

    @property
    def spans(self) -> tuple[jax.Array, jax.Array]:
        """The first span, and the one behind the last."""
        return lax.div(self.begin, SPAN), pl.cdiv(self.end, SPAN)

    def begins_row(self, program: jax.Array) -> jax.Array:
        """Whether the item of a program is the first of its row."""
        return self.part != part_of(program, begins=False)


class WorkList(NamedTuple):
    """What each program does, and what is left to merge.

    Attributes:
        items: [R + programs, 5] int32 (see `Item`), in the order of rows, then of positions.
        first_item: [programs + 1] int32; program n does the items from `first_item[n]` up to
            `first_item[n + 1]`.
        cuts: [programs, 2] int32, the row whose first part is the last item of program n, and its
            parts; 0 for none. For the numbers of these see `part_of`.
    """

    items: jax.Array
    first_item: jax.Array
    cuts: jax.Array


def part_of(program: jax.Array, begins: jax.Array | bool) -> jax.Array:
    """The number of a program's part of a row that is cut, which begins there or before."""
    return 2 * program + begins


def work_list(lengths: jax.Array, slots: jax.Array, window: int | None, programs: int) -> WorkList:
    """Give each program as many spans as any other."""
    num_rows = lengths.shape[0]
    begin = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    first_span = begin // SPAN
    spans = pl.cdiv(lengths, SPAN) - first_span
    last = jnp.cumsum(spans)
    start = last - spans
    share = jnp.maximum(pl.cdiv(last[-1], programs), 1)
    # A row begins with a part for the program its first span falls to, and has one for each other
    # program that its spans reach into.
    first_program = start // share
    parts = jnp.where(spans > 0, (last - 1) // share - first_program + 1, 0)
    last_part = jnp.cumsum(parts)

    item = jnp.arange(num_rows + programs, dtype=jnp.int32)
    row = jnp.minimum(first_beyond(last_part, item), num_rows - 1)
    program = first_program[row] + item - (last_part - parts)[row]
    since = jnp.maximum(program * share, start[row])
    until = jnp.minimum((program + 1) * share, last[row])
    place = first_span[row] - start[row]
    items = [
        row,
        slots[row],
        jnp.maximum((since + place) * SPAN, begin[row]),
        jnp.minimum((until + place) * SPAN, lengths[row]),
        jnp.where(parts[row] > 1, part_of(program, program == first_program[row]), WHOLE),
    ]

    edge = jnp.arange(programs + 1, dtype=jnp.int32) * share
    row = jnp.minimum(first_beyond(last, edge), num_rows - 1)
    since = (last_part - parts)[row] + jnp.arange(programs + 1) - first_program[row]
    first_item = jnp.where(edge < last[-1], since, last_part[-1])

    row = jnp.minimum(first_beyond(last, edge[1:] - 1), num_rows - 1)
    is_cut = (parts[row] > 1) & (first_program[row] == jnp.arange(programs))
    cuts = [row, jnp.where(is_cut, parts[row], 0)]
    return WorkList(
        jnp.stack(items, axis=1).astype(jnp.int32),
        first_item.astype(jnp.int32),
        jnp.stack(cuts, axis=1).astype(jnp.int32),
    )
