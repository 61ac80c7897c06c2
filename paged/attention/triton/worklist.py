"""How the rows of a decode step are cut into parts, one for each program.

The list is made on the device from the lengths of the whole batch, so that a few long rows and many
short ones fill the GPU alike, whatever the padding.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from paged.attention.metadata import first_beyond


class WorkList(NamedTuple):
    """What each program does, and where each row's parts are.

    Attributes:
        items: [W, 4] int32 (row, first position, end position, parts of the row); first and end
            are equal where there is nothing to do. The items of a row follow each other.
        merges: [M, 3] int32 (row, its first item, its parts) of the rows of several parts; no
            parts where there is nothing to merge.
    """

    items: jax.Array
    merges: jax.Array


def work_list(lengths: jax.Array, window: int | None, max_parts: int, span: int) -> WorkList:
    """Cut the rows into parts as even as spans allow, at most `max_parts` more than rows.

    `lengths` [R] int32 are the positions visible to each row before the window takes some away; a
    row of none has no part.
    """
    begin = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    num_spans = pl.cdiv(lengths - begin, span)
    share = jnp.maximum(pl.cdiv(num_spans.sum(), max_parts), 1)
    # Rounding up twice evens the parts of a row out, and leaves none empty.
    spans_each = jnp.maximum(pl.cdiv(num_spans, jnp.maximum(pl.cdiv(num_spans, share), 1)), 1)
    parts = pl.cdiv(num_spans, spans_each)
    last = jnp.cumsum(parts)
    item = jnp.arange(lengths.shape[0] + max_parts, dtype=jnp.int32)
    row = first_beyond(last, item)
    exists = row < lengths.shape[0]
    row = jnp.where(exists, row, 0)
    size = spans_each[row] * span
    first = begin[row] + (item - (last - parts)[row]) * size
    end = jnp.where(exists, jnp.minimum(first + size, lengths[row]), first)
    items = jnp.stack([row, first, end, parts[row]], axis=1).astype(jnp.int32)
    return WorkList(items, _merges(parts, last - parts, max_parts))


def _merges(parts: jax.Array, first: jax.Array, max_parts: int) -> jax.Array:
    """The merges of `WorkList`: no more than `max_parts`, however many rows a step is padded to.

    For `parts` [R] are at most so many more than rows; `first` [R] is the first item of each row.
    """
    number = jnp.arange(min(len(parts), max_parts), dtype=jnp.int32)
    row = first_beyond(jnp.cumsum(parts > 1), number)
    exists = row < len(parts)
    row = jnp.where(exists, row, 0)
    merges = jnp.stack([row, first[row], jnp.where(exists, parts[row], 0)], axis=1)
    return merges.astype(jnp.int32)
