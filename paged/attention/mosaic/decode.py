"""Decode attention for Hopper GPUs, in the Mosaic GPU form of Pallas.

The context of a row is read in spans of positions. All spans of a batch stand in one line, row
after row, and each program takes an equal stretch of it, for one key/value head and all the query
heads that share it. Rows that lie within one stretch are finished there. Of a row that is cut, each
program gives a part, and a second kernel merges the parts: no more rows than there are programs,
however many there are in all.

One warpgroup computes; the four warps of another walk the page tables and copy pages ahead of it
into a ring of buffers, which runs on from row to row. Values of 8 bits come into the ring as pages
hold them: keys are taken apart on their way to the tensor cores, for these take them from registers
too, and values (in the way they are multiplied, they do not) in a buffer of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.attention import triton
from paged.attention.metadata import AttentionMetadata
from paged.attention.mosaic import prefill
from paged.attention.mosaic.columns import (
    COLUMN,
    Running,
    Spec,
    accumulate,
    products_of,
    softmax,
    start,
    store_rows,
    wide,
)
from paged.attention.mosaic.spans import clear_outside, folded
from paged.attention.mosaic.words import columns_of_tile, in_halves, saturated, widened
from paged.attention.mosaic.worklist import SPAN, WHOLE, Item, part_of, work_list
from paged.attention.scoring import LOWEST, MASKED, Scoring
from paged.attention.tiling import Heads, MosaicDecode, TritonDecode
from paged.cache import WORD, Pages
from paged.kernels import MULTIPROCESSORS, Ref, swizzled

_COMPUTER, _MEMORY = range(2)  # warpgroups
_WARPS = 4
# With more query heads for each key/value head the registers of two programs do not suffice.
_MAX_GROUP = 16
# Elements of a row with a latent: of longer ones, two spans do not fit into shared memory.
_LONGEST_ROW = 576
# Elements of a head that a program merges, as many as a matrix has rows, and the most parts that it
# reads at a time: as many as there are registers for.
_MERGED, _MAX_AT_ONCE = 64, 16


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
    if isinstance(tiling, TritonDecode) or obstacle(q, pages):
        return triton.decode_attention(q, pages, lengths, meta, scoring, sinks)
    tiling = tiling or MosaicDecode.default(Heads.of(q, pages))
    return mosaic_decode(q, pages, lengths, meta, scoring, sinks, tiling=tiling)


def obstacle(q: jax.Array | jax.ShapeDtypeStruct, pages: Pages) -> str | None:
    """Why the kernels do not take these, or are slower with them; None if neither."""
    group = q.shape[1] // pages.kv_heads
    if group > _MAX_GROUP:
        return f"it takes up to {_MAX_GROUP} query heads for each key/value head, not {group}"
    if pages.scales is not None:
        return f"it is slower to read the scales of {pages.dtype}"
    if pages.latent_rank is None:
        return prefill.obstacle(q, pages)
    sizes = q.shape[-1], pages.latent_rank
    if pages.dtype != q.dtype or q.dtype.itemsize != 2:
        return f"it takes latents and queries alike in 16 bits, not {pages.dtype} and {q.dtype}"
    if any(size % 64 for size in sizes) or sizes[0] > _LONGEST_ROW:
        return f"it takes rows and latents of 64, 128, ... {_LONGEST_ROW} elements, not {sizes}"
    return None


def mosaic_decode(
    q: jax.Array,
    pages: Pages,
    lengths: jax.Array,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
    *,
    tiling: MosaicDecode,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """The kernels alone; `interpret` runs them on a CPU."""
    num_rows, num_heads, _ = q.shape
    spec = _make_spec(q, pages, meta, scoring, tiling, interpret is not None)
    if sinks is not None:
        sinks = spec.by_columns(sinks[:, None])[..., 0]
    work = work_list(lengths, meta.slots, scoring.window, spec.programs)
    kernel = functools.partial(
        plgpu.kernel,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Layouts as written, as for prefill.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=128 * spec.columns,
        ),
        interpret=interpret,
    )
    parts_shape = (2 * spec.programs, spec.kv_heads, spec.value_dim, spec.columns)
    out, parts, log_sums = kernel(
        functools.partial(_part_kernel, spec=spec),
        kernel_name="paged_decode",
        out_type=[
            jax.ShapeDtypeStruct((num_rows, num_heads, spec.value_dim), q.dtype),
            jax.ShapeDtypeStruct(parts_shape, jnp.float32),
            jax.ShapeDtypeStruct((*parts_shape[:2], spec.columns), jnp.float32),
        ],
        grid=(spec.programs, spec.kv_heads),
        grid_names=("program", "head"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[_Shared.types(spec)],
    )(
        _queries(q, spec),
        pages.values.reshape(*pages.values.shape[:2], -1),
        meta.page_tables,
        sinks,
        work.items,
        work.first_item,
    )
    out_ref = jax.new_ref(out)
    kernel(
        functools.partial(_merge_kernel, spec=spec),
        kernel_name="paged_decode_merge",
        grid=(spec.programs, spec.kv_heads, spec.value_dim // _MERGED),
        grid_names=("program", "head", "chunk"),
        scratch_types=[plgpu.SMEM((spec.columns, _MERGED), q.dtype)],
    )(parts, log_sums, work.cuts, out_ref)
    return jax.freeze(out_ref)


def _make_spec(
    q: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    scoring: Scoring,
    tiling: MosaicDecode,
    interpreted: bool,
) -> Spec:
    heads = Heads.of(q, pages)
    return Spec(
        group=heads.group,
        columns=pl.cdiv(heads.group, 8) * 8,
        kv_heads=pages.kv_heads,
        head_dim=heads.size,
        latent_rank=heads.latent_rank,
        page_size=heads.page_size,
        pages_per_table=meta.page_tables.shape[1],
        buffers=num_buffers(heads, tiling.ring),
        programs=max(MULTIPROCESSORS * tiling.residents // pages.kv_heads, 1),
        scoring=scoring,
        dtype=heads.product_dtype,
        out_dtype=heads.dtype,
        page_dtype=heads.page_dtype,
        interpreted=interpreted,
    )


def _queries(q: jax.Array, spec: Spec) -> jax.Array:
    """Queries [R, Hq, D] as they are multiplied, [R, Hkv, N, D]."""
    if not spec.narrow:
        return spec.by_columns(q)
    return in_halves(spec.by_columns(saturated(q, spec.dtype)))


def buffer_bytes(heads: Heads) -> int:
    """What a buffer of the ring takes: a span of keys, of values or of latents."""
    return SPAN * heads.size * heads.page_dtype.itemsize


def widened_bytes(heads: Heads) -> int:
    """What the values of words take beside the ring, see `_Shared`."""
    return 2 * SPAN * heads.size if heads.page_dtype.itemsize == 1 else 0


def num_buffers(heads: Heads, ring: int) -> int:
    """Those of a ring of so many bytes; with fewer than these nothing is copied ahead."""
    return max(ring // buffer_bytes(heads), 3 if heads.latent_rank is None else 2)


class _Shared(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        q: [2, N, D], the queries of this item and the next.
        ring: [buffers, span, D], keys and values by turns, or latents; of words [.., D / 2].
        wide: [span, D], the values of words; None where there are none.
        weights: [N, span], of the values.
        out: [N, elements of a value], of a row that is done.
        q_full, q_free: [2]; the queries have arrived, are used.
        full, free: [buffers], likewise.
    """

    q: Ref
    ring: Ref
    wide: Ref | None
    weights: Ref
    out: Ref
    q_full: Ref
    q_free: Ref
    full: Ref
    free: Ref

    @classmethod
    def types(cls, spec: Spec) -> _Shared:
        tiling = swizzled(64, spec.dtype.itemsize)
        of_rows = swizzled(columns_of_tile(spec.row), spec.dtype.itemsize)
        memory = functools.partial(plgpu.SMEM, dtype=spec.dtype)
        held = WORD if spec.narrow else spec.dtype
        wide = memory((SPAN, spec.head_dim), transforms=tiling) if spec.narrow else None
        return cls(
            q=memory((2, spec.columns, spec.head_dim), transforms=of_rows),
            ring=plgpu.SMEM((spec.buffers, SPAN, spec.row), held, transforms=of_rows),
            wide=wide,
            weights=memory((spec.columns, SPAN), transforms=tiling),
            out=plgpu.SMEM((spec.columns, spec.value_dim), spec.out_dtype),
            q_full=plgpu.Barrier(num_barriers=2),
            q_free=plgpu.Barrier(num_barriers=2),
            full=plgpu.Barrier(num_barriers=spec.buffers, num_arrivals=spec.copies),
            free=plgpu.Barrier(num_barriers=spec.buffers),
        )


def _part_kernel(
    q_ref: Ref,
    pages_ref: Ref,
    tables_ref: Ref,
    sinks_ref: Ref | None,
    items_ref: Ref,
    first_item_ref: Ref,
    out_ref: Ref,
    parts_ref: Ref,
    log_sums_ref: Ref,
    shared: _Shared,
    *,
    spec: Spec,
) -> None:
    """All items of one program.

    `q` [R, Hkv, N, D] and `sinks` [Hkv, N] are padded (see `Spec.by_columns`), `pages` [num_pages,
    page_size, 2 * Hkv * D] or, of latents, [.., D]. A row that is not cut goes to `out` [R, Hq, E],
    for values of E elements. `parts` [2 * programs, Hkv, E, N] are averages over the values of an
    item, and `log_sums` [2 * programs, Hkv, N] the base-2 logarithms of the sums of their weights.
    """
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    since, until = first_item_ref[program], first_item_ref[program + 1]

    def for_each_item(work: Callable[[Item, jax.Array, jax.Array], None]) -> jax.Array:
        """Call `work(item, its number, spans done before)`; gives all spans done."""

        def turn(i: jax.Array, done: jax.Array) -> jax.Array:
            item = Item(*(items_ref[i, field] for field in range(len(Item._fields))))
            work(item, i - since, done)
            first, behind = item.spans
            return done + behind - first

        return lax.fori_loop(since, until, turn, jnp.int32(0))

    @pl.when(warpgroup == _COMPUTER)
    def _() -> None:
        outputs = out_ref, parts_ref, log_sums_ref
        for_each_item(functools.partial(_compute, sinks_ref, outputs, shared, spec))

    @pl.when(warpgroup == _MEMORY)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            def work(item: Item, n: jax.Array, done: jax.Array) -> None:
                pl.when(warp == 0)(lambda: _copy_queries(item, n, q_ref, shared))
                _copy(warp, item, done, pages_ref, tables_ref, shared, spec)

            @pl.when(warp < spec.copies)
            def _() -> None:
                done = for_each_item(work)
                _drain(warp, until - since, done, shared, spec)


def _copy_queries(item: Item, n: jax.Array, q_ref: Ref, shared: _Shared) -> None:
    """Copy the queries of a program's item n."""
    slot = lax.rem(n, 2)
    pl.when(n >= 2)(lambda: plgpu.barrier_wait(shared.q_free.at[slot]))
    source = q_ref.at[item.row, lax.axis_index("head")]
    plgpu.copy_gmem_to_smem(source, shared.q.at[slot], shared.q_full.at[slot])


def _copy(
    warp: jax.Array,
    item: Item,
    done: jax.Array,
    pages_ref: Ref,
    tables_ref: Ref,
    shared: _Shared,
    spec: Spec,
) -> None:
    """Copy one warp's pages of an item into the ring, as buffers become free.

    Pages without a position of the item are left out.
    """
    rows = min(spec.page_size, SPAN)
    copies = [warp + n for n in range(0, spec.copies, _WARPS)]
    since, until = item.spans

    def table_entries(i: jax.Array) -> list[jax.Array]:
        first = lax.div(i * SPAN, spec.page_size)
        entries = (jnp.minimum(first + n, spec.pages_per_table - 1) for n in copies)
        return [tables_ref[item.table, entry] for entry in entries]

    def visit(i: jax.Array, ids: list[jax.Array]) -> list[jax.Array]:
        # Read the table one span ahead, for its answer takes longer than a copy's start.
        ahead = table_entries(jnp.minimum(i + 1, until - 1))
        offset = lax.rem(i * SPAN, spec.page_size)
        for kind in range(spec.kinds):
            count = spec.kinds * (done + i - since) + kind
            slot = lax.rem(count, spec.buffers)
            pl.when(count >= spec.buffers)(functools.partial(_wait, shared.free, slot))
            full = shared.full.at[slot]
            begin = (kind * spec.kv_heads + lax.axis_index("head")) * spec.row
            for n, page in zip(copies, ids, strict=True):
                first = i * SPAN + n * rows
                wanted = (first < item.end) & (first + rows > item.begin)
                source = pages_ref.at[page, pl.ds(offset, rows), pl.ds(begin, spec.row)]
                target = shared.ring.at[slot, pl.ds(n * rows, rows)]
                pl.when(wanted)(functools.partial(plgpu.copy_gmem_to_smem, source, target, full))
                pl.when(~wanted)(functools.partial(plgpu.barrier_arrive, full))
        return ahead

    lax.fori_loop(since, until, visit, table_entries(since))


def _wait(barriers: Ref, slot: jax.Array) -> None:
    plgpu.barrier_wait(barriers.at[slot])


def _drain(
    warp: jax.Array, items: jax.Array, spans: jax.Array, shared: _Shared, spec: Spec
) -> None:
    """Wait for the last use of each buffer: a program must not end with copies or waits open."""
    for n in range(spec.buffers):
        used = spec.kinds * spans
        slot = lax.rem(used - 1 - n, spec.buffers)
        pl.when(used > n)(functools.partial(_wait, shared.free, slot))
    for n in range(2):
        slot = lax.rem(items - 1 - n, 2)
        pl.when((items > n) & (warp == 0))(functools.partial(_wait, shared.q_free, slot))


def _compute(
    sinks_ref: Ref | None,
    outputs: tuple[Ref, Ref, Ref],
    shared: _Shared,
    spec: Spec,
    item: Item,
    n: jax.Array,
    done: jax.Array,
) -> None:
    """Attention over one item, the n-th of its program."""
    head = lax.axis_index("head")
    q_slot = lax.rem(n, 2)
    since, until = item.spans
    running = start(head, item, sinks_ref, spec)
    plgpu.barrier_wait(shared.q_full.at[q_slot])

    def visit(i: jax.Array, running: Running) -> Running:
        count = spec.kinds * (done + i - since)
        key_slot, value_slot = (lax.rem(count + kind, spec.buffers) for kind in (0, spec.kinds - 1))
        plgpu.barrier_wait(shared.full.at[key_slot])

        scores = products_of(shared.ring.at[key_slot], shared.q.at[q_slot], spec)
        if spec.kinds > 1:
            plgpu.barrier_arrive(shared.free.at[key_slot])
        running, weights = softmax(running, scores, i * SPAN, item, spec)
        shared.weights.transpose((1, 0))[...] = plgpu.layout_cast(
            weights, plgpu.Layout.WGMMA_TRANSPOSED
        )
        if spec.kinds > 1:
            plgpu.barrier_wait(shared.full.at[value_slot])
        if shared.wide is None:
            values = shared.ring.at[value_slot, :, pl.ds(0, spec.value_dim)]
        else:
            _widen(shared.ring.at[value_slot], shared.wide, spec)
            values = shared.wide
        clear_outside(values, i * SPAN, item.begin, item.end)
        plgpu.commit_smem()
        running = accumulate(running, values, shared.weights, spec)
        plgpu.barrier_arrive(shared.free.at[value_slot])
        return running

    running = lax.fori_loop(since, until, visit, running)
    plgpu.barrier_arrive(shared.q_free.at[q_slot])
    _finish(running, head, item, outputs, shared.out, spec)


def _widen(words: Ref, wide: Ref, spec: Spec) -> None:
    """Take the words [span, D / 2] of values apart, tile by tile."""
    columns = columns_of_tile(spec.row)
    for begin in range(0, spec.row, columns):
        loaded = plgpu.load(words.at[:, pl.ds(begin, columns)], layout=plgpu.Layout.WGMMA)
        part = wide.at[:, pl.ds(2 * begin, 2 * columns)]
        part[...] = widened(loaded, spec.page_dtype, interpreted=spec.interpreted)


def _finish(
    running: Running,
    head: jax.Array,
    item: Item,
    outputs: tuple[Ref, Ref, Ref],
    rows: Ref,
    spec: Spec,
) -> None:
    """Store what an item comes to."""
    out_ref, parts_ref, log_sums_ref = outputs
    out, maximum, sums = running
    total = sums.sum(axis=0)
    out /= wide(total, out.shape)

    @pl.when(item.part == WHOLE)
    def _() -> None:
        store_rows(out, rows, out_ref.at[item.row], head, spec)

    @pl.when(item.part != WHOLE)
    def _() -> None:
        parts_ref[item.part, head] = out
        log_sums_ref[item.part, head] = maximum + jnp.log2(total)


def _merge_kernel(
    parts_ref: Ref, log_sums_ref: Ref, cuts_ref: Ref, out_ref: Ref, rows: Ref, *, spec: Spec
) -> None:
    """Average the parts of one row by their sums, for some elements of one key/value head.

    `parts` and `log_sums` are those of `_part_kernel`, `cuts` those of `WorkList`.
    """
    program, head, chunk = (lax.axis_index(name) for name in ("program", "head", "chunk"))
    row, num_parts = cuts_ref[program, 0], cuts_ref[program, 1]
    elements = pl.ds(chunk * _MERGED, _MERGED)
    shape = (_MERGED, spec.columns)
    # A row of a batch of equals has half as many parts.
    at_once = min(max(2 * spec.programs // out_ref.shape[0], 2), _MAX_AT_ONCE)

    def fold(n: jax.Array, running: Running) -> Running:
        index = [n * at_once + k for k in range(at_once)]
        last = num_parts - 1
        place = [part_of(program + jnp.minimum(k, last), jnp.where(k == 0, 1, 0)) for k in index]
        sums = [plgpu.load(log_sums_ref.at[k, head], layout=COLUMN, optimized=False) for k in place]
        parts = [
            plgpu.load(parts_ref.at[k, head, elements], layout=plgpu.Layout.WGMMA, optimized=False)
            for k in place
        ]
        sums = [jnp.where(k < num_parts, s, MASKED) for k, s in zip(index, sums, strict=True)]
        return folded(running, parts, sums, wide)

    @pl.when(num_parts > 0)
    def _() -> None:
        running = (
            plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full(spec.columns, LOWEST, jnp.float32), COLUMN),
            plgpu.layout_cast(jnp.zeros(spec.columns, jnp.float32), COLUMN),
        )
        out, _, total = lax.fori_loop(0, pl.cdiv(num_parts, at_once), fold, running)
        store_rows(out / wide(total, shape), rows, out_ref.at[row, :, elements], head, spec)
