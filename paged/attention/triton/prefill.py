"""Prefill attention: the chunks of prompts, tile by tile, over pages that hold earlier context.

A tile is `TILE_SIZE` tokens of one row. A program takes the piece of a tile that makes a good
matrix with the query heads of one key/value head packed beside each other, and walks the spans its
tokens may see: masked at both ends, plain between.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.attention.metadata import AttentionMetadata
from paged.attention.triton import spans
from paged.attention.triton.spans import Ref, Spec

TILE_SIZE = 128


def prefill_attention(
    q: jax.Array,
    pages: jax.Array,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """See `paged.attention.PrefillAttention`."""
    attention = functools.partial(_prefill, scale=scale, window=window, soft_cap=soft_cap)
    return spans.for_platform(attention, q, pages, meta)


def _prefill(
    q: jax.Array,
    pages: jax.Array,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
) -> jax.Array:
    kv_heads = pages.shape[2] // 2
    spec = spans.make_spec(q, pages, scale, soft_cap, interpret)
    members = min(pl.next_power_of_2(spec.group), spec.max_queries)
    tokens = min(spec.max_queries // members, meta.tile_size)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_tile_kernel, tokens=tokens, members=members, window=window, spec=spec),
        name="paged_prefill",
        grid=(
            kv_heads * pl.cdiv(spec.group, members),
            meta.tile_size // tokens,
            meta.tile_row.shape[0],
        ),
        in_specs=[anywhere] * 10,
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
    )(
        q,
        pages,
        meta.page_tables,
        meta.slots,
        meta.query_start,
        meta.query_len,
        meta.context_len,
        meta.tile_row,
        meta.tile_start,
        meta.num_tiles[None],
    )


def _tile_kernel(
    q_ref: Ref,
    pages_ref: Ref,
    tables_ref: Ref,
    slots_ref: Ref,
    query_start_ref: Ref,
    query_len_ref: Ref,
    context_len_ref: Ref,
    tile_row_ref: Ref,
    tile_start_ref: Ref,
    num_tiles_ref: Ref,
    out_ref: Ref,
    *,
    tokens: int,
    members: int,
    window: int | None,
    spec: Spec,
) -> None:
    """A few tokens of a tile for one key/value head.

    The grid is [Hkv * pieces of a group, pieces of a tile, N]. Query r of a program is its token
    r // members with its head r % members.
    """
    head, first_member = spans.head_of(pl.program_id(0), members, spec)
    # Last tiles first: they have the longest context, and would be waited for at the end.
    tile = pl.num_programs(2) - 1 - pl.program_id(2)
    row = tile_row_ref[tile]
    begin = tile_start_ref[tile] + pl.program_id(1) * tokens
    end = jnp.minimum(begin + tokens, query_len_ref[row])

    @pl.when((tile < num_tiles_ref[0]) & (begin < end))
    def _() -> None:
        query = jnp.arange(tokens * members)
        token = begin + lax.div(query, members)
        member = first_member + lax.rem(query, members)
        columns, exist = spec.columns()
        place = (
            (query_start_ref[row] + token)[:, None],
            (head * spec.group + member)[:, None],
            columns[None, :],
        )
        mask = ((token < end) & (member < spec.group))[:, None] & exist[None, :]
        q = plgpu.load(q_ref.at[place], mask=mask, other=0.0)
        first, last = context_len_ref[row] + begin, context_len_ref[row] + end - 1
        own = jnp.minimum(context_len_ref[row] + token, last)
        slot = slots_ref[row]

        def step(i: jax.Array, running: spans.Running, *, masked: bool) -> spans.Running:
            position = i * spec.span + jnp.arange(spec.span)
            readable = position <= last
            visible = position[None, :] <= own[:, None]
            if window is not None:
                readable &= position > first - window
                visible &= position[None, :] > own[:, None] - window
            k, v = spans.load_span(pages_ref, tables_ref, slot, head, position, readable, spec)
            return spans.attend(running, q, k, v, visible if masked else None, spec)

        running = spans.start(query.shape[0], spec)
        for since, until, masked in _stretches(first, last, window, spec.span):
            body = functools.partial(step, masked=masked)
            running = lax.fori_loop(since, until, body, running)
        out, _ = spans.finish(running)
        plgpu.store(out_ref.at[place], out.astype(out_ref.dtype), mask=mask)


def _stretches(
    first: jax.Array, last: jax.Array, window: int | None, span: int
) -> list[tuple[jax.Array | int, jax.Array, bool]]:
    """Spans [since, until) that tokens at positions `first` to `last` see, and whether in part."""
    all_past = lax.div(first + 1, span)
    end = lax.div(last, span) + 1
    if window is None:
        return [(0, all_past, False), (all_past, end, True)]
    begin = lax.div(jnp.maximum(first - window + 1, 0), span)
    all_inside = pl.cdiv(jnp.maximum(last - window + 1, 0), span)
    return [
        (begin, all_inside, True),
        (all_inside, all_past, False),
        (jnp.maximum(all_inside, all_past), end, True),
    ]
