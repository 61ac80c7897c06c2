"""Prefill attention: the chunks of prompts, piece by piece, over pages that hold earlier context.

A program packs the query heads of a piece beside its tokens and walks the spans that they may see:
masked at both ends, plain between.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.attention.metadata import AttentionMetadata
from paged.attention.pieces import Cut, Piece, Step, in_turn, locate, stretches
from paged.attention.scoring import LOG2_E, Scoring
from paged.attention.tiling import Heads, TritonPrefill
from paged.attention.triton import spans
from paged.attention.triton.spans import Spec
from paged.cache import Pages
from paged.kernels import Ref, divide

TILE_SIZE = 128


def prefill_attention(
    q: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `paged.attention.PrefillAttention`."""
    tiling = meta.tilings.of_prefill(len(q))
    if not isinstance(tiling, TritonPrefill):
        tiling = TritonPrefill.default(Heads.of(q, pages))
    attention = functools.partial(_prefill, scoring=scoring, tiling=tiling)
    return spans.for_platform(attention, q, pages, meta, sinks)


def _prefill(
    q: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    sinks: jax.Array | None,
    *,
    scoring: Scoring,
    tiling: TritonPrefill,
    interpret: bool,
) -> jax.Array:
    spec = spans.make_spec(q, pages, scoring, tiling.span, interpret)
    cut = Cut.of(
        spec.group,
        pages.kv_heads,
        meta.tile_size,
        queries=tiling.queries,
        max_members=tiling.queries,
    )
    step = Step.of(meta)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    inputs = q, pages, meta.page_tables, sinks, *step
    return pl.pallas_call(
        functools.partial(_kernel, cut=cut, spec=spec),
        name="paged_prefill",
        grid=(min(tiling.programs, len(step.tiles) * cut.per_tile),),
        in_specs=jax.tree.map(lambda _: anywhere, inputs),
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
    )(*inputs)


def _kernel(
    q_ref: Ref,
    pages: Pages,
    tables_ref: Ref,
    sinks_ref: Ref | None,
    rows_ref: Ref,
    tiles_ref: Ref,
    num_tiles_ref: Ref,
    out_ref: Ref,
    *,
    cut: Cut,
    spec: Spec,
) -> None:
    """All pieces of one program; see `pieces.Step` for the shape of the step."""
    step = Step(rows_ref, tiles_ref, num_tiles_ref)
    program, programs = pl.program_id(0), pl.num_programs(0)
    num_pieces = num_tiles_ref[0] * cut.per_tile

    def turn(n: jax.Array, carry: jax.Array) -> jax.Array:
        index = in_turn(n, program, programs, num_pieces)

        @pl.when(index >= 0)
        def _() -> None:
            piece = locate(index, cut, step)
            attend = functools.partial(_attend, piece, q_ref, pages, tables_ref, sinks_ref, out_ref)
            pl.when(piece.num_tokens > 0)(functools.partial(attend, cut=cut, spec=spec))

        return carry

    lax.fori_loop(0, pl.cdiv(num_pieces, programs), turn, jnp.int32(0))


def _attend(
    piece: Piece,
    q_ref: Ref,
    pages: Pages,
    tables_ref: Ref,
    sinks_ref: Ref | None,
    out_ref: Ref,
    *,
    cut: Cut,
    spec: Spec,
) -> None:
    """Attention of one piece; its query r is token r // members with member r % members."""
    token, member = divide(jnp.arange(cut.tokens * cut.members), cut.members)
    member = piece.first_member + member
    heads = piece.head * spec.group + member
    place = piece.token + token, heads
    exist = (token < piece.num_tokens) & (member < spec.group)
    q = spans.load_queries(q_ref, place, exist, spec)
    own = jnp.minimum(piece.first + token, piece.last)
    window = spec.scoring.window

    def visit(i: jax.Array, running: spans.Running, *, whole: bool) -> spans.Running:
        position = i * spec.span + jnp.arange(spec.span)
        readable = position <= piece.last
        visible = position[None, :] <= own[:, None]
        if window is not None:
            readable &= position > piece.first - window
            visible &= position[None, :] > own[:, None] - window
        kv = spans.load_span(pages, tables_ref, piece.slot, piece.head, position, readable, spec)
        return spans.attend(running, q, kv, None if whole else visible, spec)

    sink = None
    if sinks_ref is not None:
        sink = plgpu.load(sinks_ref.at[heads], mask=member < spec.group, other=0.0) * LOG2_E
    running = spans.start(len(token), sink, spec)
    for stretch in stretches(piece, window, spec.span):
        body = functools.partial(visit, whole=stretch.whole)
        running = lax.fori_loop(stretch.since, stretch.until, body, running)
    out, _ = spans.finish(running)
    spans.store_output(out_ref, place, out, exist, spec)
