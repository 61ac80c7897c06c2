"""Decode attention: one query token per row, read from its pages by as many programs as it takes.

The visible context of a row is cut into spans, and its spans into parts (`worklist`). A program
takes one part, for one key/value head and all the query heads that share it. The program of a row's
only part finishes the row; the parts of other rows are merged by a second kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.attention.metadata import AttentionMetadata
from paged.attention.scoring import LOG2_E, MASKED, Scoring
from paged.attention.tiling import Heads, TritonDecode
from paged.attention.triton import spans
from paged.attention.triton.spans import Spec
from paged.attention.triton.worklist import work_list
from paged.cache import Pages
from paged.kernels import Ref

# The merge holds all parts of a row in registers, of so many elements at a time.
_MAX_PARTS, _MERGED = 128, 256
# Query heads of a program: tensor cores take no fewer, and with more the registers spill. A latent
# may be shared by far more, and each program reads it again.
_MEMBERS, _MEMBERS_OF_LATENT = 16, 32


def decode_attention(
    q: jax.Array,
    pages: Pages,
    lengths: jax.Array,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `paged.attention.DecodeAttention`."""
    tiling = meta.tilings.of_decode(len(q))
    if not isinstance(tiling, TritonDecode):
        tiling = TritonDecode.default(Heads.of(q, pages))
    attention = functools.partial(_decode, scoring=scoring, tiling=tiling)
    return spans.for_platform(attention, q, pages, lengths, meta, sinks)


def _decode(
    q: jax.Array,
    pages: Pages,
    lengths: jax.Array,
    meta: AttentionMetadata,
    sinks: jax.Array | None,
    *,
    scoring: Scoring,
    tiling: TritonDecode,
    interpret: bool,
) -> jax.Array:
    num_rows, num_heads, _ = q.shape
    kv_heads = pages.kv_heads
    spec = spans.make_spec(q, pages, scoring, tiling.span, interpret)
    max_parts = min(max(pl.next_power_of_2(tiling.programs // kv_heads), 1), _MAX_PARTS)
    work = work_list(lengths, scoring.window, max_parts, spec.span)
    num_items = work.items.shape[0]
    many = pages.latent_rank is not None and spec.group > _MEMBERS and q.dtype.itemsize == 2
    members = _MEMBERS_OF_LATENT if many else _MEMBERS
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    inputs = q, pages, meta.page_tables, meta.slots, work.items, sinks
    out, parts, log_sums = pl.pallas_call(
        functools.partial(_part_kernel, members=members, spec=spec),
        name="paged_decode",
        grid=(kv_heads * pl.cdiv(spec.group, members), num_items),
        in_specs=jax.tree.map(lambda _: anywhere, inputs),
        out_specs=[anywhere] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_heads, spec.value_dim), q.dtype),
            jax.ShapeDtypeStruct((num_items, num_heads, spec.value_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items, num_heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
    )(*inputs)
    merged = min(pl.next_power_of_2(spec.value_dim), _MERGED)
    merge_warps = min(max(max_parts * merged // 2048, 1), 8)
    return pl.pallas_call(
        functools.partial(_merge_kernel, max_parts=max_parts, merged=merged, spec=spec),
        name="paged_decode_merge",
        grid=(num_heads, len(work.merges), pl.cdiv(spec.value_dim, merged)),
        in_specs=[anywhere] * 4,
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=merge_warps, num_stages=1),
        interpret=interpret,
    )(parts, log_sums, work.merges, out)


def _part_kernel(
    q_ref: Ref,
    pages: Pages,
    tables_ref: Ref,
    slots_ref: Ref,
    items_ref: Ref,
    sinks_ref: Ref | None,
    out_ref: Ref,
    parts_ref: Ref,
    log_sums_ref: Ref,
    *,
    members: int,
    spec: Spec,
) -> None:
    """One part of one row for one key/value head, in a grid of [Hkv * pieces of a group, W].

    A row's only part goes to `out` [R, Hq, D]; another one to `parts` [W, Hq, D], with the base-2
    logarithm of its softmax sum in `log_sums` [W, Hq].
    """
    item = pl.program_id(1)
    row, begin, end, parts = (items_ref[item, field] for field in range(4))
    head, first_member = spans.head_of(pl.program_id(0), members, spec)
    member = first_member + jnp.arange(members)
    heads = head * spec.group + member
    exist = member < spec.group

    @pl.when(begin < end)
    def _() -> None:
        q = spans.load_queries(q_ref, (row, heads), exist, spec)
        slot = slots_ref[row]

        def step(i: jax.Array, running: spans.Running) -> spans.Running:
            position = begin + i * spec.span + jnp.arange(spec.span)
            readable = position < end
            kv = spans.load_span(pages, tables_ref, slot, head, position, readable, spec)
            return spans.attend(running, q, kv, readable[None, :], spec)

        sink = None
        if sinks_ref is not None:
            # Each part counts its share of the sink, so that all together count it once.
            sink = plgpu.load(sinks_ref.at[heads], mask=exist, other=0.0)
            sink = sink * LOG2_E - jnp.log2(parts.astype(jnp.float32))
        running = spans.start(members, sink, spec)
        running = lax.fori_loop(0, pl.cdiv(end - begin, spec.span), step, running)
        out, log_sum = spans.finish(running)
        several = parts > 1
        spans.store_output(out_ref, (row, heads), out, exist & ~several, spec)
        spans.store_output(parts_ref, (item, heads), out, exist & several, spec)
        plgpu.store(log_sums_ref.at[item, heads], log_sum, mask=exist & several)


def _merge_kernel(
    parts_ref: Ref,
    log_sums_ref: Ref,
    merges_ref: Ref,
    finished_ref: Ref,
    out_ref: Ref,
    *,
    max_parts: int,
    merged: int,
    spec: Spec,
) -> None:
    """Average the parts of one row for one query head by their sums, in a grid of [Hq, M, ..].

    The last axis is of `merged` elements each. `out` is `finished` in place, where the rows of one
    part are done already.
    """
    del finished_ref
    head, merge = pl.program_id(0), pl.program_id(1)
    row, first, num_parts = (merges_ref[merge, field] for field in range(3))
    columns = pl.program_id(2) * merged + jnp.arange(merged)
    exist = columns < spec.value_dim

    @pl.when(num_parts > 1)
    def _() -> None:
        part = jnp.arange(max_parts)
        there = part < num_parts
        item = first + part
        log_sum = plgpu.load(log_sums_ref.at[item, head], mask=there, other=MASKED)
        out = plgpu.load(
            parts_ref.at[item[:, None], head, columns[None, :]],
            mask=there[:, None] & exist[None, :],
            other=0.0,
        )
        weights = jnp.exp2(log_sum - log_sum.max())
        merged = (out * weights[:, None]).sum(axis=0) / weights.sum()
        plgpu.store(out_ref.at[row, head, columns], merged.astype(out_ref.dtype), mask=exist)
