"""Prefill attention: the chunks of prompts, piece by piece, over pages that hold earlier context.

A piece is the few tokens of a tile that make a good matrix with the query heads of one key/value
head packed beside them. It walks the spans that its tokens may see: masked at both ends, plain
between. A fixed number of programs shares the pieces there are, so that a step padded for many
rows costs no more than its chunks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.attention.metadata import AttentionMetadata
from paged.attention.triton import spans
from paged.attention.triton.spans import Ref, Spec

TILE_SIZE = 128
# About four for each multiprocessor of a large GPU, which evens out what they are given.
_PROGRAMS = 512


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
    spec = spans.make_spec(q, pages, scale, soft_cap, interpret)
    cut = _Cut.of(spec, pages.shape[2] // 2, meta.tile_size)
    rows = jnp.stack([meta.slots, meta.query_start, meta.query_len, meta.context_len], axis=1)
    tiles = jnp.stack([meta.tile_row, meta.tile_start], axis=1)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, cut=cut, window=window, spec=spec),
        name="paged_prefill",
        grid=(min(_PROGRAMS, len(tiles) * cut.pieces * cut.heads),),
        in_specs=[anywhere] * 6,
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
    )(q, pages, meta.page_tables, rows, tiles, meta.num_tiles[None])


@dataclass(frozen=True)
class _Cut:
    """How a tile is cut into pieces, the query matrices of [tokens * members, D].

    Attributes:
        members: query heads of a piece, a power of two; those beyond the group are padding.
        tokens: tokens of a piece.
        heads: pieces that share their tokens.
        pieces: pieces of a tile that share their heads.
    """

    members: int
    tokens: int
    heads: int
    pieces: int

    @classmethod
    def of(cls, spec: Spec, kv_heads: int, tile_size: int) -> _Cut:
        members = min(pl.next_power_of_2(spec.group), spec.max_queries)
        tokens = min(spec.max_queries // members, tile_size)
        heads = kv_heads * pl.cdiv(spec.group, members)
        return cls(members, tokens, heads, pieces=tile_size // tokens)


def _kernel(
    q_ref: Ref,
    pages_ref: Ref,
    tables_ref: Ref,
    rows_ref: Ref,
    tiles_ref: Ref,
    num_tiles_ref: Ref,
    out_ref: Ref,
    *,
    cut: _Cut,
    window: int | None,
    spec: Spec,
) -> None:
    """Every so-manieth piece of the step.

    Args:
        rows_ref: [R, 4] slot, first flat token, tokens and earlier context of each row.
        tiles_ref: [N, 2] row and first token of each tile; `num_tiles_ref` [1] are in use.
    """
    program, programs = pl.program_id(0), pl.num_programs(0)
    num_pieces = num_tiles_ref[0] * cut.pieces * cut.heads
    refs = (q_ref, pages_ref, tables_ref, rows_ref, tiles_ref, out_ref)

    def turn(n: jax.Array, carry: jax.Array) -> jax.Array:
        # Last tiles first, for they have the longest context, and back and forth: programs that
        # came off worse in one turn come off better in the next.
        place = jnp.where(lax.rem(n, 2) == 0, program, programs - 1 - program)
        piece = num_pieces - 1 - (n * programs + place)
        attend = functools.partial(_attend, piece, *refs, cut=cut, window=window, spec=spec)
        pl.when(piece >= 0)(attend)
        return carry

    lax.fori_loop(0, pl.cdiv(num_pieces, programs), turn, jnp.int32(0))


def _attend(
    piece: jax.Array,
    q_ref: Ref,
    pages_ref: Ref,
    tables_ref: Ref,
    rows_ref: Ref,
    tiles_ref: Ref,
    out_ref: Ref,
    *,
    cut: _Cut,
    window: int | None,
    spec: Spec,
) -> None:
    """Attention of the tokens and heads of one piece; query r is token r // members of it."""
    head, first_member = spans.head_of(lax.rem(piece, cut.heads), cut.members, spec)
    tile, part = _divide(lax.div(piece, cut.heads), cut.pieces)
    row, tile_start = (tiles_ref[tile, field] for field in range(2))
    slot, query_start, query_len, context_len = (rows_ref[row, field] for field in range(4))
    begin = tile_start + part * cut.tokens
    end = jnp.minimum(begin + cut.tokens, query_len)

    @pl.when(begin < end)
    def _() -> None:
        token, member = _divide(jnp.arange(cut.tokens * cut.members), cut.members)
        token, member = begin + token, first_member + member
        columns, exist = spec.columns()
        heads = head * spec.group + member
        place = (query_start + token)[:, None], heads[:, None], columns[None, :]
        mask = ((token < end) & (member < spec.group))[:, None] & exist[None, :]
        q = plgpu.load(q_ref.at[place], mask=mask, other=0.0)
        first, last = context_len + begin, context_len + end - 1
        own = jnp.minimum(context_len + token, last)

        def step(i: jax.Array, running: spans.Running, *, masked: bool) -> spans.Running:
            position = i * spec.span + jnp.arange(spec.span)
            readable = position <= last
            visible = position[None, :] <= own[:, None]
            if window is not None:
                readable &= position > first - window
                visible &= position[None, :] > own[:, None] - window
            k, v = spans.load_span(pages_ref, tables_ref, slot, head, position, readable, spec)
            return spans.attend(running, q, k, v, visible if masked else None, spec)

        running = spans.start(len(token), spec)
        for since, until, masked in _stretches(first, last, window, spec.span):
            body = functools.partial(step, masked=masked)
            running = lax.fori_loop(since, until, body, running)
        out, _ = spans.finish(running)
        plgpu.store(out_ref.at[place], out.astype(out_ref.dtype), mask=mask)


def _divide(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of numbers that are not negative."""
    return lax.div(number, by), lax.rem(number, by)


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
