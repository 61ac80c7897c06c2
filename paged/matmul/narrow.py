"""Products with weights of fewer bits than activations, for Hopper GPUs, in Mosaic GPU's Pallas.

The weight is the left operand of tensor cores, out of registers: a warpgroup takes 64 of its
outputs, copies their bricks into registers and unpacks them there (`paged.matmul.bricks`), and
multiplies them by all rows of x, which are the columns of the right operand, as few as 8. Scales
belong to groups of inputs: with few rows each group's sums are scaled, being fewer than its
weights. One more warpgroup copies bricks, scales and x ahead of the others.

Several parts of K may be summed apart: what counts with few rows is that all multiprocessors read.
Else gates may be applied as results leave: half of the warpgroups have gates, and take from the
others what these multiply.
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

from paged.kernels import Ref, divide
from paged.matmul.bricks import BRICK, FP8, INT4, Kind
from paged.matmul.cuts import cut_for
from paged.matmul.narrow_buffers import Buffer, Plan, Shared
from paged.matmul.tiling import ROW_UNIT, Cut

MOST_NARROW_ROWS = 256
"""Rows of x that the kernel takes: as many columns as a tensor core has."""


def supports_narrow(rows: int, inputs: int, outputs: int, group: int) -> bool:
    """Whether the kernel takes x of so many rows and a weight of this shape and groups."""
    whole_groups = BRICK % group == 0 or group % 128 == 0 or group == BRICK
    whole = inputs % 128 == 0 and outputs % BRICK == 0 and inputs % group == 0
    return rows <= MOST_NARROW_ROWS and whole and whole_groups and group >= 32


def narrow_matmul(
    x: jax.Array,
    words: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    gated: bool = False,
    out_dtype: jnp.dtype | None = None,
    cut: Cut | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [M, K] times (value - zero) * scale, [M, N].

    Args:
        x: a float of 16 bits.
        words: [N / 64, K / 64, *shape] uint32, see `Kind.words`; of 4 bits a value less 8.
        scale: [K / group, N], in x's dtype.
        zero: the same shape and dtype, or None for zeros; of 4 bits it is less 8 too.
        gated: give silu(gate) * up, [M, N / 2]: the first half of the outputs are gates.
        out_dtype: of the result; x's own by default.
        cut: how; by default what is good for most shapes.
        interpret: run on a CPU, in Pallas' interpreter.

    Raises:
        ValueError: for arrays that `supports_narrow` rejects, and gates that are no whole bricks.
    """
    (rows, inputs), outputs = x.shape, scale.shape[1]
    group = inputs // scale.shape[0]
    if not supports_narrow(rows, inputs, outputs, group) or x.dtype.itemsize != 2:
        raise ValueError(
            f"the kernel takes up to {MOST_NARROW_ROWS} rows of 16-bit floats, inputs in multiples "
            f"of 128, outputs in multiples of {BRICK} and groups of 32, 64 or multiples of 128, "
            f"got {x.dtype} {x.shape}, {outputs} outputs and groups of {group}: expand the weight"
        )
    if gated and outputs % (2 * BRICK):
        raise ValueError(f"half of the outputs must be a multiple of {BRICK}, got {outputs}")
    kind = kind_of(words)
    # Rows of shared memory come in eights, and those of an array do too if it has more.
    padding = -rows % ROW_UNIT if rows > ROW_UNIT else 0
    x = jnp.pad(x, ((0, padding), (0, 0))) if padding else x
    cut = cut or cut_for(kind, rows, inputs, outputs, group)
    fused = gated and cut.splits == 1 and cut.warpgroups % 2 == 0
    later = cut.splits > 1 or (gated and not fused)
    dtype = jnp.dtype(out_dtype or x.dtype)
    plan = Plan(
        cut=cut,
        kind=kind,
        m=rows + padding,
        k=inputs,
        n=outputs,
        group=group,
        zeros=zero is not None,
        gated=fused,
        dtype=jnp.dtype(x.dtype),
        out_dtype=jnp.dtype(jnp.float32) if later else dtype,
        interpreted=interpret is not None,
    )
    parts = (cut.splits,) if cut.splits > 1 else ()
    out = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        kernel_name="paged_matmul_narrow" + "_gated" * plan.gated,
        out_type=jax.ShapeDtypeStruct((*parts, plan.m, outputs // plan.parts), plan.out_dtype),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=cut.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[Shared.types(plan)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(x, words, scale, zero)
    if later:
        out = jnp.sum(out, axis=0) if parts else out
        out = (_gated(out) if gated else out).astype(dtype)
    return out[:rows] if padding else out


def _gated(both: jax.Array) -> jax.Array:
    """silu(gate) * up of both [M, N], gates first."""
    gate, up = jnp.split(both, 2, axis=1)
    return jax.nn.silu(gate) * up


def kind_of(words: jax.Array) -> Kind:
    """Of weights [N / 64, K / 64, *shape]."""
    return next(kind for kind in (INT4, FP8) if kind.shape == words.shape[2:])


def _kernel(
    x_ref: Ref,
    w_ref: Ref,
    scale_ref: Ref,
    zero_ref: Ref | None,
    out_ref: Ref,
    shared: tuple[Ref, ...],
    *,
    plan: Plan,
) -> None:
    """All tiles of one program."""
    parts = Shared(*shared)
    warpgroup = lax.axis_index("warpgroup")
    computers = plan.cut.warpgroups
    wide = computers == 2 and plan.cut.residents == 1

    @pl.when(warpgroup < computers)
    def _() -> None:
        if wide:
            plgpu.set_max_registers(232, action="increase")
        _for_each_unit(plan, functools.partial(_compute, warpgroup, out_ref, parts, plan))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == computers)
    def _() -> None:
        if wide:
            plgpu.set_max_registers(40, action="decrease")
        scale_refs = (scale_ref,) if zero_ref is None else (scale_ref, zero_ref)
        copy = functools.partial(_copy, x_ref, w_ref, scale_refs, parts, plan)
        _for_each_unit(plan, copy)


class _Unit(NamedTuple):
    """A tile and a part of K: where it starts, in tiles and in buffers, and what came before.

    Attributes:
        tile, split: which.
        begin, end: of its buffers in K.
        done: buffers that the program filled before.
    """

    tile: jax.Array
    split: jax.Array
    begin: jax.Array
    end: jax.Array
    done: jax.Array


def _for_each_unit(plan: Plan, handle: Callable[[_Unit], None]) -> None:
    """Call `handle` for the units of this program."""
    first = lax.axis_index("program")

    def turn(i: jax.Array, done: jax.Array) -> jax.Array:
        tile, split = divide(first + i * plan.programs, plan.cut.splits)
        begin = lax.div(split * plan.steps, plan.cut.splits)
        end = lax.div((split + 1) * plan.steps, plan.cut.splits)
        handle(_Unit(tile, split, begin, end, done))
        return done + end - begin

    turns = lax.div(plan.units - first + plan.programs - 1, plan.programs)
    lax.fori_loop(0, turns, turn, jnp.int32(0))


def _copy(
    x_ref: Ref, w_ref: Ref, scale_refs: tuple[Ref, ...], shared: Shared, plan: Plan, unit: _Unit
) -> None:
    """Fill buffers as they become free."""
    cut = plan.cut

    def fill(step: jax.Array, carry: jax.Array) -> jax.Array:
        count = unit.done + step - unit.begin
        slot = lax.rem(count, plan.stages)
        full = shared.full.at[slot]
        pl.when(count >= plan.stages)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
        start = pl.multiple_of(step * cut.depth, cut.depth)
        rows = x_ref.at[pl.ds(0, plan.columns), pl.ds(start, cut.depth)]
        plgpu.copy_gmem_to_smem(rows, shared.x.at[slot], full)
        bricks = pl.ds(step * plan.bricks, plan.bricks)
        groups = pl.ds(lax.div(start, plan.group), plan.scale_rows)
        for part in range(plan.parts):
            first = unit.tile * plan.teams + part * (plan.n // plan.parts // BRICK)
            place = shared.w.at[slot, pl.ds(part * plan.teams, plan.teams)]
            plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(first, plan.teams), bricks], place, full)
            outputs = pl.ds(pl.multiple_of(first * BRICK, BRICK), plan.teams * BRICK)
            for i, ref in enumerate(scale_refs):
                place = shared.scales.at[slot, i, part]
                plgpu.copy_gmem_to_smem(ref.at[groups, outputs], place, full)
        return carry

    lax.fori_loop(unit.begin, unit.end, fill, jnp.int32(0))


def _compute(warpgroup: jax.Array, out_ref: Ref, shared: Shared, plan: Plan, unit: _Unit) -> None:
    """One warpgroup's outputs of a tile."""
    shape = BRICK, plan.columns

    def for_each_buffer[T](add: Callable[[Buffer, T], T], start: T) -> T:
        def step(k: jax.Array, carry: T) -> T:
            slot = lax.rem(unit.done + k - unit.begin, plan.stages)
            plgpu.barrier_wait(shared.full.at[slot])
            carry = add(Buffer(plan, shared, warpgroup, slot), carry)
            plgpu.barrier_arrive(shared.free.at[slot])
            return carry

        return lax.fori_loop(unit.begin, unit.end, step, start)

    def multiplied(acc: Ref) -> jax.Array:
        def add(buffer: Buffer, carry: jax.Array) -> jax.Array:
            for i in range(plan.bricks):  # while one is multiplied, the next is unpacked
                brick = range(i, i + 1)
                plgpu.wgmma(acc, buffer.weight(brick), buffer.x(brick))
            plgpu.wgmma_wait(0)
            return carry

        for_each_buffer(add, jnp.int32(0))
        return acc[...]

    if plan.scales_sums or plan.interpreted:
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        acc = for_each_buffer(_add_groups if plan.scales_sums else _add_slowly, zeros)
    else:
        acc = pl.run_scoped(multiplied, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    _store(acc, warpgroup, out_ref, shared, plan, unit)


def _add_groups(buffer: Buffer, acc: jax.Array) -> jax.Array:
    """Multiply a buffer, and scale the sums of each run."""
    plan = buffer.plan
    each = plan.run // BRICK
    for first in range(0, plan.bricks, each):
        bricks, group = range(first, first + each), first * BRICK // plan.group
        sums = _product(buffer.unscaled(bricks), buffer.x(bricks), interpreted=plan.interpreted)
        acc += sums * buffer.of_group(0, group, acc.shape).astype(jnp.float32)
    return acc


def _add_slowly(buffer: Buffer, acc: jax.Array) -> jax.Array:
    """Multiply a buffer in Pallas' interpreter."""
    bricks = range(buffer.plan.bricks)
    return acc + _product(buffer.weight(bricks), buffer.x(bricks), interpreted=True)


def _product(weight: jax.Array, x: Ref, *, interpreted: bool) -> jax.Array:
    """A weight [64, K] times x [K, columns]."""
    if interpreted:  # knows no operand in registers
        return jnp.dot(weight.astype(jnp.float32), x[...].astype(jnp.float32))

    def multiplied(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, weight, x)
        return acc[...]

    shape = weight.shape[0], x.shape[1]
    return pl.run_scoped(multiplied, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _store(
    acc: jax.Array, warpgroup: jax.Array, out_ref: Ref, shared: Shared, plan: Plan, unit: _Unit
) -> None:
    """Turn the accumulator [64, columns] and copy it out, a chunk of rows of x at a time."""
    if plan.cut.splits > 1:
        out_ref = out_ref.at[unit.split]
    part, team = divide(warpgroup, plan.teams)
    first = (unit.tile * plan.teams + team) * BRICK
    outputs = pl.ds(pl.multiple_of(first, BRICK), BRICK)

    def store(row: int, chunk: jax.Array) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer = shared.out.at[warpgroup, pl.ds(0, chunk.shape[1])]
        buffer.transpose((1, 0))[...] = plgpu.layout_cast(chunk, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out_ref.at[pl.ds(row, chunk.shape[1]), outputs])

    def hand_over(chunk: jax.Array) -> None:
        buffer = shared.out.at[warpgroup, pl.ds(0, chunk.shape[1])]
        up = plgpu.layout_cast(chunk.astype(plan.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        buffer.transpose((1, 0))[...] = up
        plgpu.barrier_arrive(shared.handed.at[team])
        plgpu.barrier_wait(shared.taken.at[team])

    def store_gated(row: int, chunk: jax.Array) -> None:
        plgpu.barrier_wait(shared.handed.at[team])
        buffer = shared.out.at[warpgroup + plan.teams, pl.ds(0, chunk.shape[1])]
        turned = buffer.transpose((1, 0))
        up = plgpu.load(turned, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
        plgpu.barrier_arrive(shared.taken.at[team])
        gate = (chunk / (1 + jnp.exp(-chunk))).astype(plan.out_dtype)
        store(row, plgpu.layout_cast(gate, plgpu.Layout.WGMMA_TRANSPOSED) * up)

    for row in range(0, plan.columns, plan.chunk):
        chunk = acc[:, row : min(row + plan.chunk, plan.columns)]
        if plan.gated:
            pl.when(part == 1)(functools.partial(hand_over, chunk))
            pl.when(part == 0)(functools.partial(store_gated, row, chunk))
        else:
            store(row, chunk.astype(plan.out_dtype))
