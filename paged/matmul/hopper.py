"""Matrix products for Hopper GPUs with what follows them, in the Mosaic GPU form of Pallas.

A program computes tiles of the output, one after another. One warpgroup copies tiles of x and of
the weight into a ring of buffers, and runs ahead into the next output tile; the others multiply,
each with an accumulator of its own in registers, and finish the tile there: the gated form
multiplies silu(gate) by up, the residual form adds. Programs of a cluster share what they read:
those with the same columns and other rows the weight, those with the same rows and other columns x.

Tiles may reach over the edges of the arrays. Copies read zeros there, and write nothing.

Operands of 8 bits come with the depth last in both, and have scales: one for each row of x, one for
each column of the output. The finished accumulator is multiplied by them, before all else.

Rows may come in groups, each with a weight of its own and as many rows as the device finds. Then a
list on the device says which rows a tile has, and of whose weight. A tile may reach into the next
group's rows too, and writes none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.kernels import Ref, divide, swizzled
from paged.matmul.groups import Groups, WorkList, work_list
from paged.matmul.output import Output, Shared, Tile, span
from paged.matmul.tiling import OUTPUT_SLOTS, ROWS, Plan, Tiling

# Groups of rows and the tiles they are cut into.
_Work = tuple[Groups, WorkList]
# Of rows [M] and of columns, [N] or [2, F].
Scales = tuple[jax.Array, jax.Array]


def hopper_matmul(
    x: jax.Array,
    w: jax.Array,
    tiling: Tiling,
    *,
    residual: jax.Array | None = None,
    scales: Scales | None = None,
    groups: Groups | None = None,
    out_dtype: jnp.dtype | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """The kernel alone: see `paged.matmul.matmul`. `interpret` runs it on a CPU.

    With `scales` see `paged.matmul.scaled_matmul`; of several splits they are left to the caller.

    Rows must be fewer than 8 or a multiple of 8. Several splits give [splits, M, N], yet to be
    summed, and are not for gates or a residual. With `groups`, w has an axis of them first; see
    `paged.matmul.grouped_matmul`.
    """
    work = None
    if groups is not None:
        work = groups, work_list(groups, x.shape[0], tiling.height)
        w = w.reshape(-1, *w.shape[2:])
    plan = Plan(
        tiling=tiling,
        m=x.shape[0],
        k=x.shape[1],
        n=w.shape[-1] if x.dtype.itemsize > 1 else w.shape[-2],
        gated=w.ndim == 3,
        residual=residual is not None,
        scaled=scales is not None,
        dtype=x.dtype,
        out_dtype=jnp.dtype(out_dtype or x.dtype),
        interpreted=interpret is not None,
        groups=0 if groups is None else len(groups.sizes),
        most=0 if groups is None else groups.most,
    )
    parts = (tiling.splits,) if tiling.splits > 1 else ()
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        kernel_name=_name(plan),
        out_type=jax.ShapeDtypeStruct((*parts, plan.m, plan.n), plan.out_dtype),
        grid=(plan.clusters,),
        grid_names=("group",),
        cluster=(tiling.row_cluster, tiling.column_cluster),
        cluster_names=("cluster_row", "cluster_column"),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(plan),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(x, w, residual, scales, work)


def _name(plan: Plan) -> str:
    return "paged_matmul" + "_grouped" * bool(plan.groups) + "_gated" * plan.gated


def _scratch(plan: Plan) -> tuple[Any, ...]:
    """See `Shared`; the views of the ring of weights are one union."""
    tile = plan.tiling
    operand = functools.partial(swizzled, plan.swizzle, plan.dtype.itemsize)
    memory = functools.partial(plgpu.SMEM, dtype=plan.dtype)
    views = _weight_views(plan)
    out_shape = (tile.warpgroups, OUTPUT_SLOTS, ROWS, plan.chunk)
    out_transforms = swizzled(plan.chunk, plan.out_dtype.itemsize)
    weight_copies = 2 if plan.gated and (plan.interpreted or plan.depth_last) else 1
    copies = tile.row_warpgroups + tile.column_warpgroups * weight_copies
    return (
        memory((plan.stages, tile.row_warpgroups, ROWS, tile.depth), transforms=operand()),
        plgpu.RefUnion(*views) if len(views) > 1 else tuple(views),
        plgpu.SMEM(out_shape, plan.out_dtype, transforms=out_transforms),
        plgpu.Barrier(num_barriers=plan.stages, num_arrivals=copies),
        _free_barriers(plan),
        plgpu.Barrier(num_barriers=(tile.warpgroups, OUTPUT_SLOTS)) if plan.residual else None,
        *_scratch_of_scales(plan),
    )


def _weight_views(plan: Plan) -> list[Any]:
    """Of the ring of weights: as buffers of each width, and with gates as their halves too."""
    tile = plan.tiling
    operand = functools.partial(swizzled, plan.swizzle, plan.dtype.itemsize)
    memory = functools.partial(plgpu.SMEM, dtype=plan.dtype)
    buffers = plan.stages, tile.column_warpgroups
    if plan.depth_last:
        return [memory((*buffers, max(tile.widths), tile.depth), transforms=operand())]

    def ring(width: int) -> tuple[int, ...]:
        return *buffers, plan.buffer_rows(width)

    views = [memory((*ring(width), width), transforms=operand()) for width in tile.widths]
    if plan.gated:
        halves = [(*ring(width), 2, width // 2) for width in tile.widths]
        views += [memory(shape, transforms=operand(1)) for shape in halves]
    return views


def _scratch_of_scales(plan: Plan) -> tuple[Any, ...]:
    """Those of a warpgroup's rows and columns, and whether they have arrived."""
    if not plan.scaled:
        return (None, None, None)
    warpgroups = plan.tiling.warpgroups
    return (
        plgpu.SMEM((warpgroups, ROWS), jnp.float32),
        plgpu.SMEM((warpgroups, plan.halves, max(plan.out_widths)), jnp.float32),
        plgpu.Barrier(num_barriers=warpgroups, num_arrivals=1 + plan.halves),
    )


def _free_barriers(plan: Plan) -> plgpu.Barrier | plgpu.ClusterBarrier:
    """A buffer is free when all programs that share a part of it are done with theirs."""
    tile = plan.tiling
    sizes = {"cluster_row": tile.row_cluster, "cluster_column": tile.column_cluster}
    axes = tuple(name for name, size in sizes.items() if size > 1)
    if not axes:
        return plgpu.Barrier(num_barriers=plan.stages, num_arrivals=tile.warpgroups)
    return plgpu.ClusterBarrier(
        collective_axes=axes, num_barriers=plan.stages, num_arrivals=tile.warpgroups
    )


def _kernel(
    x_ref: Ref,
    w_ref: Ref,
    residual_ref: Ref | None,
    scale_refs: tuple[Ref, Ref] | None,
    work: _Work | None,
    out_ref: Ref,
    x_ring: Ref,
    w_rings: tuple[Ref, ...],
    *others: Ref,
    plan: Plan,
) -> None:
    """All tiles of one program."""
    phases = 1 if plan.depth_last else len(plan.tiling.widths)
    shared = Shared(x_ring, w_rings[:phases], w_rings[phases:], *others)
    ends = residual_ref, scale_refs, out_ref
    warpgroup = lax.axis_index("warpgroup")
    computers = plan.tiling.warpgroups
    # Each starts with its share of a multiprocessor's registers, 168 of three and 128 of four. The
    # one that copies needs few, and leaves the rest to the others.
    alone = plan.tiling.residents == 1
    more, fewer = {2: (232, 40), 3: (160, 32)}.get(computers, (0, 0)) if alone else (0, 0)

    @pl.when(warpgroup < computers)
    def _() -> None:
        if more:
            plgpu.set_max_registers(more, action="increase")
        compute = functools.partial(_compute, warpgroup, ends, shared, plan)
        _for_each_tile(plan, work, compute)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == computers)
    def _() -> None:
        if fewer:
            plgpu.set_max_registers(fewer, action="decrease")
        turns = _for_each_tile(plan, work, functools.partial(_copy, x_ref, w_ref, shared, plan))

        # A program must not end while others of its cluster may arrive at its barriers.
        @pl.when(turns > 0)
        def _() -> None:
            for slot in range(plan.stages):
                plgpu.barrier_wait(shared.free.at[slot])


def _for_each_tile(plan: Plan, work: _Work | None, handle: Callable[[Tile], None]) -> jax.Array:
    """Call `handle` for the tiles of this program. Returns how many there are."""
    tile = plan.tiling
    first = lax.axis_index("group")
    row_tiles = plan.row_tiles if work is None else work[1].ends[plan.groups - 1]

    def turn(done: jax.Array, carry: jax.Array) -> jax.Array:
        split, index = divide(first + done * plan.clusters, row_tiles * plan.column_tiles)
        stripe, index = divide(index, plan.stripe * plan.column_tiles)
        row = stripe * plan.stripe
        # Without groups all stripes are whole.
        in_stripe = plan.stripe if work is None else lax.min(plan.stripe, row_tiles - row)
        column, index = divide(index, in_stripe)
        row = (row + index) * tile.row_cluster + lax.axis_index("cluster_row")
        column = (column * tile.column_cluster + lax.axis_index("cluster_column")) * plan.columns
        if work is None:
            handle(Tile(split, row * tile.height, column, done))
        else:
            handle(_tile_of_group(plan, work, split, row, column, done))
        return carry

    tiles = row_tiles * plan.column_tiles * tile.splits
    turns = lax.div(tiles - first + plan.clusters - 1, plan.clusters)
    lax.fori_loop(0, turns, turn, jnp.int32(0))
    return turns


def _tile_of_group(
    plan: Plan,
    work: _Work,
    split: jax.Array,
    index: jax.Array,
    column: jax.Array,
    done: jax.Array,
) -> Tile:
    """The row tile `index` of the list, at a column."""
    groups, tiles = work
    group = tiles.groups[index]
    # Of the group's tiles, those from this one on.
    left = tiles.ends[group] - index
    end, size, height = groups.ends[group], groups.sizes[group], plan.tiling.height
    before = lax.div(size + height - 1, height) - left
    return Tile(split, end - size + before * height, column, done, end, group * plan.k)


def _copy(x_ref: Ref, w_ref: Ref, shared: Shared, plan: Plan, place: Tile) -> None:
    """Copy what a tile is made of into the ring, as its buffers become free."""
    for phase in range(len(plan.tiling.widths)):
        fill = functools.partial(_fill, x_ref, w_ref, shared, plan, place, phase)
        lax.fori_loop(0, plan.steps, fill, jnp.int32(0))


def _fill(
    x_ref: Ref,
    w_ref: Ref,
    shared: Shared,
    plan: Plan,
    place: Tile,
    phase: int,
    step: jax.Array,
    carry: jax.Array,
) -> jax.Array:
    """Fill one buffer."""
    tile = plan.tiling
    count = _count(plan, place, phase) + step
    slot = lax.rem(count, plan.stages)
    full = shared.full.at[slot]
    pl.when(count >= plan.stages)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
    start = (place.split * plan.steps + step) * tile.depth
    depth, weight_rows = span(start, tile.depth), span(place.weight + start, tile.depth)
    for i in range(tile.row_warpgroups):
        rows = span(place.row + i * ROWS, plan.rows_loaded, 8)
        target = shared.x.at[slot, i, pl.ds(0, plan.rows_loaded)]
        _multicast(x_ref.at[rows, depth], target, full, "cluster_column", tile.column_cluster)
    for j in range(tile.column_warpgroups):
        column = _column(plan, place, phase, j)
        _copy_weight(w_ref, weight_rows, column, slot, j, phase, full, shared, plan)
    return carry


def _count(plan: Plan, place: Tile, phase: int) -> jax.Array:
    """Buffers filled before those of a phase."""
    return (place.done * len(plan.tiling.widths) + phase) * plan.steps


def _column(plan: Plan, place: Tile, phase: int, j: jax.Array | int) -> jax.Array:
    """The first output column of column warpgroup `j` in a phase."""
    before = sum(plan.out_widths[:phase]) * plan.tiling.column_warpgroups
    return place.column + before + j * plan.out_widths[phase]


def _copy_weight(
    w_ref: Ref,
    depth: pl.Slice,
    column: jax.Array,
    slot: jax.Array,
    j: int,
    phase: int,
    full: Ref,
    shared: Shared,
    plan: Plan,
) -> None:
    """Copy the columns of column warpgroup `j` from `column` on: with gates, of either half."""
    rows = pl.ds(0, plan.tiling.depth)
    copy = functools.partial(
        _multicast, full=full, axis="cluster_row", sharers=plan.tiling.row_cluster
    )
    width = plan.out_widths[phase]
    columns = span(column, width, plan.column_unit)
    if plan.depth_last:
        for half in range(plan.halves):
            source = w_ref.at[half, columns, depth] if plan.gated else w_ref.at[columns, depth]
            copy(source, shared.w[0].at[slot, j, pl.ds(half * width, width)])
    elif not plan.gated:
        copy(w_ref.at[depth, columns], shared.w[phase].at[slot, j, rows])
    elif plan.interpreted:  # which does not know that the views share their memory
        for half in range(2):
            target = shared.w[phase].at[slot, j, rows, pl.ds(half * width, width)]
            copy(w_ref.at[depth, half, columns], target)
    else:
        copy(w_ref.at[depth, :, columns], shared.w_halves[phase].at[slot, j, rows])


def _multicast(source: Ref, target: Ref, full: Ref, axis: str, sharers: int) -> None:
    plgpu.copy_gmem_to_smem(source, target, full, collective_axes=axis if sharers > 1 else None)


def _compute(
    warpgroup: jax.Array,
    ends: tuple[Ref | None, tuple[Ref, Ref] | None, Ref],
    shared: Shared,
    plan: Plan,
    place: Tile,
) -> None:
    """One warpgroup's part of a tile; `ends` are the residual, the scales and the output."""
    i, j = divide(warpgroup, plan.tiling.column_warpgroups)
    row = place.row + i * ROWS

    def multiply() -> None:
        for phase, width in enumerate(plan.out_widths):
            column = _column(plan, place, phase, j)
            output = Output(warpgroup, *ends, shared, plan, place, row, column, width)
            output.begin()
            output.store(_products(i, j, shared, plan, place, phase))

    if place.end is None or plan.tiling.row_warpgroups == 1:
        multiply()
    else:
        pl.when(row < place.end)(multiply)
        pl.when(row >= place.end)(functools.partial(_let_pass, shared, plan, place))


def _let_pass(shared: Shared, plan: Plan, place: Tile) -> None:
    """Free the buffers of a tile that has no rows for this warpgroup."""
    before = _count(plan, place, 0)

    def step(k: jax.Array, carry: jax.Array) -> jax.Array:
        slot = lax.rem(before + k, plan.stages)
        plgpu.barrier_wait(shared.full.at[slot])
        plgpu.barrier_arrive(shared.free.at[slot])
        return carry

    lax.fori_loop(0, plan.steps * len(plan.tiling.widths), step, jnp.int32(0))


def _products(
    i: jax.Array, j: jax.Array, shared: Shared, plan: Plan, place: Tile, phase: int
) -> jax.Array:
    """The sum over K of the products of buffers, [rows, width] in `Plan.sum_dtype`."""
    tile = plan.tiling
    before = _count(plan, place, phase)
    rows = pl.ds(0, tile.depth)

    def weight(slot: jax.Array) -> Ref:
        if plan.depth_last:
            outputs = pl.ds(0, tile.widths[phase])
            return shared.w[0].at[slot, j, outputs].transpose((1, 0))
        return shared.w[phase].at[slot, j, rows]

    def release(count: jax.Array) -> None:
        plgpu.barrier_arrive(shared.free.at[lax.rem(count, plan.stages)])

    def all_steps(acc: Ref) -> jax.Array:
        def step(k: jax.Array, carry: jax.Array) -> jax.Array:
            slot = lax.rem(before + k, plan.stages)
            plgpu.barrier_wait(shared.full.at[slot])
            plgpu.wgmma(acc, shared.x.at[slot, i], weight(slot))
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: release(before + k - 1))
            return carry

        lax.fori_loop(0, plan.steps, step, jnp.int32(0))
        return acc[...]

    shape = (ROWS, tile.widths[phase])
    acc = pl.run_scoped(all_steps, plgpu.WGMMAAccumulatorRef(shape, plan.sum_dtype))
    release(before + plan.steps - 1)
    return acc
