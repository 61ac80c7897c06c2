"""How prefill fills its ring from pages of 8 bits: copied as they are, then widened.

One warpgroup does both. While it widens keys, the values of the same span are on their way, and the
next keys while it widens values: there is one buffer for each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.attention.mosaic.rows import ROWS, Spec
from paged.attention.mosaic.words import columns_of_tile, widened
from paged.attention.pieces import Piece, stretches
from paged.cache import WORD
from paged.kernels import Ref, swizzled


class Words(NamedTuple):
    """Shared memory for what has been copied, and its barriers.

    Attributes:
        k, v: [span, D / 2] of words.
        k_full, v_full: copies have arrived.
    """

    k: Ref
    v: Ref
    k_full: Ref
    v_full: Ref

    @classmethod
    def types(cls, spec: Spec) -> Words:
        row = spec.head_dim // 2
        tiles = swizzled(columns_of_tile(row), WORD.itemsize)
        span = plgpu.SMEM((spec.span, row), WORD, transforms=tiles)
        full = plgpu.Barrier(num_arrivals=spec.copies)
        return cls(span, span, full, full)


class Ring(NamedTuple):
    """The ring of a program, see `prefill`."""

    k: Ref
    v: Ref
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref


class Source(NamedTuple):
    """Pages in the device's memory: their values and scales, and the tables that name them."""

    values: Ref
    scales: Ref | None
    tables: Ref


def copy_and_widen(
    source: Source, words: Words, ring: Ring, spec: Spec, piece: Piece, done: jax.Array
) -> None:
    """Bring the keys and values that a piece sees into the ring, as its buffers become free."""
    visits = stretches(piece, spec.scoring.window, spec.span)
    since, until = visits[0].since, visits[-1].until
    rows = min(spec.page_size, spec.span)

    def table_entries(i: jax.Array) -> tuple[jax.Array, ...]:
        # Behind the table's end any page will do: what lies behind the sequence's is masked.
        first = lax.div(jnp.minimum(i, until - 1) * spec.span, spec.page_size)
        entries = (jnp.minimum(first + j, spec.pages_per_table - 1) for j in range(spec.copies))
        return tuple(source.tables[piece.slot, entry] for entry in entries)

    def copy(i: jax.Array, ids: tuple[jax.Array, ...], buffer: Ref, full: Ref, head: jax.Array):
        offset = pl.multiple_of(lax.rem(i * spec.span, spec.page_size), rows)
        for j, page in enumerate(ids):
            place = source.values.at[page, pl.ds(offset, rows), head]
            plgpu.copy_gmem_to_smem(place, buffer.at[pl.ds(j * rows, rows)], full)

    k_head, v_head = piece.head, piece.head + spec.kv_heads

    def visit(i: jax.Array, ids: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        count = done + i - since
        slot = lax.rem(count, spec.stages)
        # Read the table a span ahead, for its answer takes longer than a copy's start.
        ahead = table_entries(i + 2)

        def fill(words: Ref, arrived: Ref, buffers: Ref, full: Ref, free: Ref, head: jax.Array):
            plgpu.barrier_wait(arrived)
            pl.when(count >= spec.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            _widen(words, buffers.at[slot], spec)
            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[slot])
            pl.when(i + 1 < until)(lambda: copy(i + 1, ids, words, arrived, head))

        fill(words.k, words.k_full, ring.k, ring.k_full, ring.k_free, k_head)
        fill(words.v, words.v_full, ring.v, ring.v_full, ring.v_free, v_head)
        return ahead

    first = table_entries(since)
    copy(since, first, words.k, words.k_full, k_head)
    copy(since, first, words.v, words.v_full, v_head)
    lax.fori_loop(since, until, visit, table_entries(since + 1))


def _widen(words: Ref, wide: Ref, spec: Spec) -> None:
    """Take the words of a span apart, tile by tile: registers are scarce here."""
    row = spec.head_dim // 2
    columns = columns_of_tile(row)

    def turn(n: jax.Array, carry: jax.Array) -> jax.Array:
        offset = pl.multiple_of(n * ROWS, ROWS)
        for begin in range(0, row, columns):
            tile = words.at[pl.ds(offset, ROWS), pl.ds(begin, columns)]
            loaded = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            part = wide.at[pl.ds(offset, ROWS), pl.ds(2 * begin, 2 * columns)]
            part[...] = widened(loaded, spec.page_dtype, interpreted=spec.interpreted)
        return carry

    lax.fori_loop(0, spec.span // ROWS, turn, jnp.int32(0))
