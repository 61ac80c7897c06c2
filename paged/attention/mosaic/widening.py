"""How prefill fills its ring from pages of 8 bits: copied as they are, then widened.

One warpgroup does both. While it widens keys, the values of the same span are on their way, and the
next keys while it widens values: there is one buffer for each.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.attention.mosaic.rows import ROWS, Spec
from paged.attention.mosaic.scales import Ahead, ScaledSpans, by_rows, of_keys, of_values
from paged.attention.mosaic.splits import Task
from paged.attention.mosaic.words import WIDE, columns_of_tile, widened
from paged.cache import WORD
from paged.kernels import Ref, swizzled

_WARPS = 4
# Words of a tile: registers are scarce here.
_MOST_COLUMNS = 32


class Words(NamedTuple):
    """Shared memory for what has been copied, and its barriers.

    Attributes:
        k, v: [lead, span, D / 2] of words.
        k_full, v_full: [lead]; copies have arrived.
    """

    k: Ref
    v: Ref
    k_full: Ref
    v_full: Ref

    @classmethod
    def types(cls, spec: Spec) -> Words:
        row = spec.head_dim // 2
        tiles = swizzled(columns_of_tile(row, _MOST_COLUMNS), WORD.itemsize)
        span = plgpu.SMEM((spec.lead, spec.span, row), WORD, transforms=tiles)
        full = plgpu.Barrier(num_barriers=spec.lead, num_arrivals=spec.copies)
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
    """Pages in the device's memory.

    Attributes:
        values: see `paged.cache.Pages`.
        tables: [S, P], the pages of each slot.
        scales: those of the pages and the tables, both in one line (see `ScaledSpans`), or None.
    """

    values: Ref
    tables: Ref
    scales: tuple[Ref, Ref] | None


def copy_and_widen(
    source: Source, words: Words, ring: Ring, spec: Spec, task: Task, done: jax.Array
) -> None:
    """Bring the keys and values that a piece sees into the ring, as its buffers become free."""
    piece, (since, until) = task.piece, task.spans
    rows = min(spec.page_size, spec.span)

    def table_entries(i: jax.Array) -> tuple[jax.Array, ...]:
        # Behind the table's end any page will do: what lies behind the sequence's is masked.
        first = lax.div(jnp.minimum(i, until - 1) * spec.span, spec.page_size)
        entries = (jnp.minimum(first + j, spec.pages_per_table - 1) for j in range(spec.copies))
        return tuple(source.tables[piece.slot, entry] for entry in entries)

    def copy(
        i: jax.Array,
        held: jax.Array,
        ids: tuple[jax.Array, ...],
        buffers: Ref,
        full: Ref,
        head: jax.Array,
    ) -> None:
        offset = pl.multiple_of(lax.rem(i * spec.span, spec.page_size), rows)

        # A copy takes a while to start: each warp starts some of them.
        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            for n in range(0, spec.copies, _WARPS):
                page = _of_warp(warp, ids[n : n + _WARPS])
                place = source.values.at[page, pl.ds(offset, rows), head]
                target = buffers.at[held, pl.ds((n + warp) * rows, rows)]
                start = functools.partial(plgpu.copy_gmem_to_smem, place, target, full.at[held])
                pl.when((i < until) & (n + warp < spec.copies))(start)

    k_head, v_head = piece.head, piece.head + spec.kv_heads

    scaled = None
    if source.scales is not None:
        scaled = ScaledSpans(*source.scales, piece.slot, piece.head, spec, spec.span)

    def visit(
        i: jax.Array, carry: tuple[tuple[jax.Array, ...], Ahead | None]
    ) -> tuple[tuple[jax.Array, ...], Ahead | None]:
        ids, scales_ahead = carry
        scale = None
        if scaled is not None and scales_ahead is not None:
            scale, scales_ahead = scaled.next(i, scales_ahead)
        count = done + i - since
        slot, held = lax.rem(count, spec.stages), lax.rem(count, spec.lead)
        # Read the table a span ahead, for its answer takes longer than a copy's start.
        ahead = table_entries(i + spec.lead + 1)

        def fill(
            words: Ref,
            arrived: Ref,
            buffers: Ref,
            full: Ref,
            free: Ref,
            head: jax.Array,
            scale: jax.Array | None,
        ) -> None:
            plgpu.barrier_wait(arrived.at[held])
            pl.when(count >= spec.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            _widen(words.at[held], buffers.at[slot], scale, spec)
            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[slot])
            copy(i + spec.lead, held, ids, words, arrived, head)

        k_scale, v_scale = (None, None) if scale is None else (of_keys(scale), of_values(scale))
        fill(words.k, words.k_full, ring.k, ring.k_full, ring.k_free, k_head, k_scale)
        fill(words.v, words.v_full, ring.v, ring.v_full, ring.v_free, v_head, v_scale)
        return ahead, scales_ahead

    for n in range(spec.lead):
        held, ids = lax.rem(done + n, spec.lead), table_entries(since + n)
        copy(since + n, held, ids, words.k, words.k_full, k_head)
        copy(since + n, held, ids, words.v, words.v_full, v_head)
    scales_ahead = None if scaled is None else scaled.first(since)
    lax.fori_loop(since, until, visit, (table_entries(since + spec.lead), scales_ahead))


def _of_warp(warp: jax.Array, values: tuple[jax.Array, ...]) -> jax.Array:
    """One for each warp; the last for those that are more."""
    picked = values[-1]
    for n, value in enumerate(values[:-1]):
        picked = jnp.where(warp == n, value, picked)
    return picked


def _widen(words: Ref, wide: Ref, scale: jax.Array | None, spec: Spec) -> None:
    """Take the words of a span apart, tile by tile."""
    row = spec.head_dim // 2
    columns = columns_of_tile(row, _MOST_COLUMNS)
    for offset in range(0, spec.span, ROWS):
        for begin in range(0, row, columns):
            tile = words.at[pl.ds(offset, ROWS), pl.ds(begin, columns)]
            loaded = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            values = widened(loaded, spec.page_dtype, interpreted=spec.interpreted)
            if scale is not None:
                of_rows = scale[offset : offset + ROWS].astype(values.dtype)
                values *= plgpu.layout_cast(by_rows(of_rows, values.shape), WIDE)
            part = wide.at[pl.ds(offset, ROWS), pl.ds(2 * begin, 2 * columns)]
            part[...] = values
