"""Prefill attention for Hopper GPUs, in the Mosaic GPU form of Pallas.

A piece is 128 query rows: a few tokens with the query heads of one key/value head. Two warpgroups
compute 64 rows each and take turns, so that the products of one run while the other works on its
softmax. A third one walks the page table and copies keys and values ahead of them, page by page,
into a ring of buffers. The ring runs on from piece to piece. What pages hold in 8 bits is copied to
a buffer beside the ring, and the third warpgroup itself widens it into the ring. Where a step has
few pieces, those behind long contexts are split, see `splits`.

Other GPUs, float32 and head sizes other than 64, 128, 192 and 256 are left to the
Triton kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.attention import triton
from paged.attention.metadata import AttentionMetadata
from paged.attention.mosaic.rows import (
    COMPUTERS,
    ROWS,
    Running,
    Spec,
    accumulate,
    half_of,
    query_head,
    softmax,
    start,
    store_output,
    visible_to_rows,
    wide,
)
from paged.attention.mosaic.scales import in_one_line
from paged.attention.mosaic.spans import clear_outside
from paged.attention.mosaic.splits import (
    Task,
    merged,
    result_shapes,
    split_tiles,
    task_of,
    worth_splitting,
)
from paged.attention.mosaic.widening import Ring, Source, Words, copy_and_widen
from paged.attention.mosaic.words import saturated
from paged.attention.pieces import Cut, Piece, Step, in_turn
from paged.attention.scoring import Scoring
from paged.attention.tiling import Heads, MosaicPrefill, TritonPrefill
from paged.cache import Pages
from paged.kernels import MULTIPROCESSORS, Ref, swizzled

TILE_SIZE = 128
_MEMORY = COMPUTERS  # the warpgroup that copies
# Bytes of shared memory for queries, ring and words together; of 227 KiB barriers take some.
_ROOM = 224 * 1024


def prefill_attention(
    q: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `paged.attention.PrefillAttention`."""
    tiling = meta.tilings.of_prefill(len(q))
    if isinstance(tiling, TritonPrefill) or obstacle(q, pages):
        return triton.prefill_attention(q, pages, meta, scoring, sinks)
    tiling = tiling or MosaicPrefill.default(Heads.of(q, pages))
    return mosaic_prefill(q, pages, meta, scoring, sinks, tiling=tiling)


def obstacle(q: jax.Array | jax.ShapeDtypeStruct, pages: Pages) -> str | None:
    """Why the kernel does not take these; None if it does."""
    head_dim = q.shape[-1]
    if pages.latent_rank is not None:
        return "its pages hold keys and values, not latents"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes 16-bit floats, not {q.dtype}"
    if pages.dtype != q.dtype and pages.dtype.itemsize > 1:
        return f"its pages are of 8 bits or of the model's {q.dtype}, not {pages.dtype}"
    if head_dim % 64 or head_dim > 256:
        return f"it takes heads of 64, 128, 192 or 256 elements, not {head_dim}"
    return None


def mosaic_prefill(
    q: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
    *,
    tiling: MosaicPrefill,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """The kernel alone; `interpret` runs it on a CPU."""
    spec = _make_spec(q, pages, meta, scoring, tiling, interpret is not None)
    split = split_tiles(meta, spec, MULTIPROCESSORS) if spec.may_split else None
    step = Step.of(meta) if split is None else split.step
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    out, *results = plgpu.kernel(
        functools.partial(_kernel, spec=spec),
        kernel_name="paged_prefill_mosaic",
        out_type=[shape, *(result_shapes(spec) if split else ())],
        grid=(min(tiling.programs * MULTIPROCESSORS, len(step.tiles) * spec.cut.per_tile),),
        grid_names=("program",),
        num_threads=COMPUTERS + 1,
        thread_name="warpgroup",
        scratch_types=[_Shared.types(spec)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Layouts as written: inferring them finds none for rows outside of tiles.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # What words become is written where the last barrier makes sure that nobody reads.
            unsafe_no_auto_barriers=spec.narrow,
        ),
        interpret=interpret,
    )(q, pages.values, meta.page_tables, in_one_line(pages.scales, meta.page_tables), sinks, step)
    return out if split is None else merged(out, results, split, spec, MULTIPROCESSORS, interpret)


def _make_spec(
    q: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    scoring: Scoring,
    tiling: MosaicPrefill,
    interpreted: bool,
) -> Spec:
    heads = Heads.of(q, pages)
    cut = Cut.of(
        heads.group,
        pages.kv_heads,
        meta.tile_size,
        queries=COMPUTERS * ROWS,
        max_members=8,  # a member's tokens make whole rows of 8 in the tiles of `_Shared`
    )
    return Spec(
        cut=cut,
        head_dim=heads.size,
        kv_heads=pages.kv_heads,
        page_size=heads.page_size,
        pages_per_table=meta.page_tables.shape[1],
        span=tiling.span,
        stages=tiling.stages,
        lead=_lead(heads, tiling),
        may_split=worth_splitting(pl.cdiv(len(q), cut.tokens) * cut.heads, MULTIPROCESSORS),
        scoring=scoring,
        dtype=heads.product_dtype,
        out_dtype=heads.dtype,
        page_dtype=heads.page_dtype,
        interpreted=interpreted,
    )


def _lead(heads: Heads, tiling: MosaicPrefill) -> int:
    """Spans of words that are on their way at a time: two where there is room."""
    wide = COMPUTERS * ROWS + 2 * tiling.stages * tiling.span
    words = 2 * 2 * tiling.span
    return 2 if heads.size * (2 * wide + words) <= _ROOM else 1


class _Shared(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        queries: [COMPUTERS, ROWS, D], those of each computing warpgroup, and then their output:
            the same memory in tiles, and row after row as the device's memory has them.
        k, v: [stages, span, D], the ring.
        words: what is to be widened into the ring; None where pages hold what is multiplied.
        q_full, k_full, v_full: copies have arrived, and are widened.
        k_free, v_free: both computing warpgroups are done with a buffer.
        turn: the computing warpgroups meet here to take turns.
    """

    queries: tuple[Ref, Ref]
    k: Ref
    v: Ref
    words: Words | None
    q_full: Ref
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref
    turn: Ref

    @property
    def q(self) -> Ref:
        """The queries in tiles, from which tensor cores multiply."""
        return self.queries[0]

    @property
    def rows(self) -> Ref:
        """Queries or output, row after row."""
        return self.queries[1]

    @classmethod
    def types(cls, spec: Spec) -> _Shared:
        memory = functools.partial(plgpu.SMEM, dtype=spec.dtype)
        tiles = swizzled(64, spec.dtype.itemsize)
        queries = (COMPUTERS, ROWS, spec.head_dim)
        union: Any = plgpu.RefUnion(
            memory(queries, transforms=tiles), plgpu.SMEM(queries, spec.out_dtype)
        )
        ring = memory((spec.stages, spec.span, spec.head_dim), transforms=tiles)
        arrivals = 1 if spec.narrow else spec.copies
        full = plgpu.Barrier(num_barriers=spec.stages, num_arrivals=arrivals)
        free = plgpu.Barrier(num_barriers=spec.stages, num_arrivals=COMPUTERS)
        return cls(
            queries=union,
            k=ring,
            v=ring,
            words=Words.types(spec) if spec.narrow else None,
            q_full=plgpu.Barrier(num_barriers=COMPUTERS, num_arrivals=spec.cut.members),
            k_full=full,
            v_full=full,
            k_free=free,
            v_free=free,
            turn=plgpu.Barrier(num_barriers=1, num_arrivals=COMPUTERS),
        )


def _kernel(
    q_ref: Ref,
    pages_ref: Ref,
    tables_ref: Ref,
    scales: tuple[Ref, Ref] | None,
    sinks_ref: Ref | None,
    step: Step,
    out_ref: Ref,
    *refs: Any,
    spec: Spec,
) -> None:
    """All pieces of one program.

    `refs` are, if contexts may be split, those of `result_shapes`, and shared memory.
    """
    *results, shared = refs
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < COMPUTERS)
    def _() -> None:
        # Three times the 168 registers that each warpgroup starts with, shared out anew.
        plgpu.set_max_registers(216 if spec.narrow else 232, action="increase")
        outputs = out_ref, *results
        computer = functools.partial(
            _compute, warpgroup, step, q_ref, sinks_ref, outputs, shared, spec
        )
        _for_each_piece(step, spec, computer)

    @pl.when(warpgroup == _MEMORY)
    def _() -> None:
        plgpu.set_max_registers(72 if spec.narrow else 40, action="decrease")
        if shared.words is None:
            copy = functools.partial(_copy, pages_ref, tables_ref, shared, spec)
        else:
            ring = Ring(
                shared.k, shared.v, shared.k_full, shared.v_full, shared.k_free, shared.v_free
            )
            source = Source(pages_ref, tables_ref, scales)
            copy = functools.partial(copy_and_widen, source, shared.words, ring, spec)
        copied = _for_each_piece(step, spec, copy)
        _drain(copied, shared, spec)


def _for_each_piece(step: Step, spec: Spec, work: Callable[[Task, jax.Array], None]) -> jax.Array:
    """Call `work(task, spans done before)` for this program's pieces; gives all spans done."""
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    num_pieces = step.num_tiles[0] * spec.cut.per_tile

    def turn(n: jax.Array, done: jax.Array) -> jax.Array:
        index = in_turn(n, program, programs, num_pieces)
        task = task_of(jnp.maximum(index, 0), step, spec)
        here = (index >= 0) & (task.piece.num_tokens > 0)
        pl.when(here)(lambda: work(task, done))
        return done + jnp.where(here, task.num_spans, 0)

    return lax.fori_loop(0, pl.cdiv(num_pieces, programs), turn, jnp.int32(0))


def _copy(
    pages_ref: Ref, tables_ref: Ref, shared: _Shared, spec: Spec, task: Task, done: jax.Array
) -> None:
    """Copy the keys and values that a piece sees into the ring, as its buffers become free."""
    piece, (since, until) = task.piece, task.spans

    def table_entries(i: jax.Array) -> tuple[jax.Array, ...]:
        # Behind the table's end any page will do: what lies behind the sequence's is masked.
        first = lax.div(i * spec.span, spec.page_size)
        entries = (jnp.minimum(first + j, spec.pages_per_table - 1) for j in range(spec.copies))
        return tuple(tables_ref[piece.slot, entry] for entry in entries)

    def visit(i: jax.Array, ids: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        count = done + i - since
        slot = lax.rem(count, spec.stages)
        # Read the table one span ahead, for its answer takes longer than a copy's start.
        ahead = table_entries(jnp.minimum(i + 1, until - 1))
        rows = min(spec.page_size, spec.span)
        offset = pl.multiple_of(lax.rem(i * spec.span, spec.page_size), rows)

        def fill(buffers: Ref, full: Ref, free: Ref, head: jax.Array) -> None:
            pl.when(count >= spec.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            for j, page in enumerate(ids):
                source = pages_ref.at[page, pl.ds(offset, rows), head]
                target = buffers.at[slot, pl.ds(j * rows, rows)]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])

        fill(shared.k, shared.k_full, shared.k_free, piece.head)
        fill(shared.v, shared.v_full, shared.v_free, piece.head + spec.kv_heads)
        return ahead

    lax.fori_loop(since, until, visit, table_entries(since))


def _drain(copied: jax.Array, shared: _Shared, spec: Spec) -> None:
    """Wait for the last use of each buffer: a program must not end with copies or waits open."""
    for n in range(spec.stages):

        @pl.when(copied > n)
        def _(n: int = n) -> None:
            slot = lax.rem(copied - 1 - n, spec.stages)
            plgpu.barrier_wait(shared.k_free.at[slot])
            plgpu.barrier_wait(shared.v_free.at[slot])


def _compute(
    warpgroup: jax.Array,
    step: Step,
    q_ref: Ref,
    sinks_ref: Ref | None,
    outputs: tuple[Ref, ...],
    shared: _Shared,
    spec: Spec,
    task: Task,
    done: jax.Array,
) -> None:
    """Attention of one warpgroup's half of a piece."""
    piece = task.piece
    half = half_of(piece, warpgroup, spec)
    _load_queries(warpgroup, q_ref, shared, spec, half)
    take_turns = functools.partial(_take_turns, shared)
    window = spec.scoring.window
    oldest = jnp.int32(0) if window is None else piece.first - window + 1
    running = start(sinks_ref, half, spec, counts=task.split == 0)
    pl.when(warpgroup == 1)(take_turns)  # it runs half a span behind the other
    for stretch in task.visits:

        def visit(i: jax.Array, running: Running, whole: bool = stretch.whole) -> Running:
            slot = lax.rem(done + i - task.spans[0], spec.stages)
            plgpu.barrier_wait(shared.k_full.at[slot])
            products = _products(warpgroup, slot, shared, spec)
            plgpu.barrier_arrive(shared.k_free.at[slot])
            visible = None if whole else visible_to_rows(i * spec.span, half, spec)
            running, weights = softmax(running, products, visible, spec)
            plgpu.barrier_arrive(shared.turn)
            plgpu.barrier_wait(shared.v_full.at[slot])
            if not whole:  # both computing warpgroups do it, and write the same
                clear_outside(shared.v.at[slot], i * spec.span, oldest, piece.last + 1)
                plgpu.commit_smem()
            plgpu.barrier_wait(shared.turn)
            running = accumulate(running, weights, shared.v.at[slot], spec)
            plgpu.barrier_arrive(shared.v_free.at[slot])
            return running

        running = lax.fori_loop(stretch.since, stretch.until, visit, running)
    pl.when(warpgroup == 0)(take_turns)
    out, maximum, total = running
    out /= wide(total, out.shape)

    # Found once more, for registers are scarce until here.
    task = task_of(task.number, step, spec)
    half = half_of(task.piece, warpgroup, spec)

    def store() -> None:
        rows = shared.rows.at[warpgroup]
        store_output(out.astype(spec.out_dtype), rows, outputs[0], half, spec)

    if not spec.may_split:
        store()
        return
    pl.when(task.num_splits == 1)(store)

    @pl.when(task.num_splits > 1)
    def _() -> None:
        _, averages, log_sums = outputs
        place = *task.place, pl.ds(warpgroup * ROWS, ROWS)
        averages[place], log_sums[place] = out, maximum + jnp.log2(total)


def _take_turns(shared: _Shared) -> None:
    """Let the other computing warpgroup have the tensor cores, and wait for them."""
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.turn)


def _products(warpgroup: jax.Array, slot: jax.Array, shared: _Shared, spec: Spec) -> jax.Array:
    """q·k [ROWS, span] of a warpgroup's queries and the keys in a buffer."""

    def multiply(products: Ref) -> jax.Array:
        keys = shared.k.at[slot].transpose((1, 0))
        plgpu.wgmma(products, shared.q.at[warpgroup], keys)
        _take_turns(shared)  # while the product runs
        return products[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, spec.span), jnp.float32))


def _load_queries(
    warpgroup: jax.Array, q_ref: Ref, shared: _Shared, spec: Spec, half: Piece
) -> None:
    """Copy the query rows of a warpgroup.

    They pass through `rows`, since a copy into the tiles that products want would have to start at
    every eighth token.
    """
    for m in range(spec.cut.members):
        source = q_ref.at[pl.ds(half.token, spec.tokens), query_head(m, half, spec)]
        target = shared.rows.at[warpgroup, pl.ds(m * spec.tokens, spec.tokens)]
        plgpu.copy_gmem_to_smem(source, target, shared.q_full.at[warpgroup])
    plgpu.barrier_wait(shared.q_full.at[warpgroup])
    rows = plgpu.load(shared.rows.at[warpgroup], layout=plgpu.Layout.WGMMA, optimized=False)
    if spec.narrow:  # where there are no other barriers: all have read what lies where tiles go
        plgpu.commit_smem()
    shared.q[warpgroup] = saturated(rows, spec.dtype)
    plgpu.commit_smem()
