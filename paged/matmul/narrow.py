"""Products with weights of fewer bits than activations, for Hopper GPUs, in Mosaic GPU's Pallas.

The weight is the left operand of tensor cores, out of registers: a warpgroup takes 64 of its
outputs, copies their bricks into registers and unpacks them there (`paged.matmul.bricks`), and
multiplies them by all rows of x, which are the columns of the right operand, as few as 8. Scales
belong to groups of inputs: with few rows each group's sums are scaled, being fewer than its
weights. One more warpgroup copies bricks, scales and x ahead of the others.

Several parts of K may be summed apart: what counts with few rows is that all multiprocessors read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.kernels import MULTIPROCESSORS, Ref, divide, swizzled
from paged.matmul.bricks import BRICK, FP8, INT4, Kind
from paged.matmul.cuts import cut_for, scales_sums
from paged.matmul.tiling import ROW_UNIT, Cut

_SHARED_BYTES, _MOST_STAGES = 231424, 12
# Rows of x whose results leave at once.
_CHUNK = 64
MOST_NARROW_ROWS = 256
"""Rows of x that the kernel takes: as many columns as a tensor core has."""


@dataclass(frozen=True)
class Plan:
    """A product and its cut: what is fixed when the kernel is compiled.

    Attributes:
        cut: see there.
        kind: how the weight is stored.
        m, k, n: x is [m, k], the output [m, n].
        group: inputs that share a scale.
        zeros: whether each group has a value for 0.
        dtype: of x and scales.
        out_dtype: of the output.
        interpreted: whether Pallas' interpreter runs the kernel.
    """

    cut: Cut
    kind: Kind
    m: int
    k: int
    n: int
    group: int
    zeros: bool
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    interpreted: bool

    @property
    def columns(self) -> int:
        """Of the right operand: the rows of x, filled up."""
        return pl.cdiv(self.m, ROW_UNIT) * ROW_UNIT

    @property
    def chunk(self) -> int:
        """Rows of x whose results leave at once."""
        return min(self.columns, _CHUNK)

    @property
    def outputs(self) -> int:
        """Of a program's tile."""
        return BRICK * self.cut.warpgroups

    @property
    def bricks(self) -> int:
        """Of a warpgroup in a buffer."""
        return self.cut.depth // BRICK

    @property
    def scale_rows(self) -> int:
        """Groups in a buffer."""
        return max(1, self.cut.depth // self.group)

    @property
    def run(self) -> int:
        """Inputs of a buffer that share a scale."""
        return min(self.group, self.cut.depth)

    @property
    def scales_sums(self) -> bool:
        """Whether a group's sums are scaled, and not its weights."""
        return scales_sums(self.columns, self.run)

    @property
    def steps(self) -> int:
        """Buffers of the whole of K."""
        return self.k // self.cut.depth

    @property
    def units(self) -> int:
        """Tiles and parts of K."""
        return pl.cdiv(self.n, self.outputs) * self.cut.splits

    @property
    def programs(self) -> int:
        """Those that share the units."""
        return min(self.units, MULTIPROCESSORS * self.cut.residents)

    @property
    def stages(self) -> int:
        """Buffers of the ring: as many as there is memory for."""
        cut, item = self.cut, self.dtype.itemsize
        weight = self.outputs * cut.depth * self.kind.bits // 8
        scales = (1 + self.zeros) * self.scale_rows * self.outputs * item
        stage = weight + scales + self.columns * cut.depth * item
        out = cut.warpgroups * self.chunk * BRICK * self.out_dtype.itemsize
        return min(_MOST_STAGES, (_SHARED_BYTES // cut.residents - out) // stage, self.steps)


class Shared(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        x: [stages, columns, depth].
        w: [stages, warpgroups, bricks, *words].
        scales: [stages, 1, or 2 with zeros, groups, outputs].
        out: [warpgroups, chunk, 64].
        full, free: of the ring.
    """

    x: Ref
    w: Ref
    scales: Ref
    out: Ref
    full: Ref
    free: Ref

    @staticmethod
    def types(plan: Plan) -> tuple[Any, ...]:
        cut, stages = plan.cut, plan.stages
        parts = (1 + plan.zeros, plan.scale_rows, plan.outputs)
        bricks = (cut.warpgroups, plan.bricks, *plan.kind.shape)
        return (
            plgpu.SMEM(
                (stages, plan.columns, cut.depth),
                plan.dtype,
                transforms=swizzled(BRICK, plan.dtype.itemsize),
            ),
            plgpu.SMEM((stages, *bricks), jnp.uint32),
            plgpu.SMEM((stages, *parts), plan.dtype),
            plgpu.SMEM((cut.warpgroups, plan.chunk, BRICK), plan.out_dtype),
            plgpu.Barrier(num_barriers=stages, num_arrivals=3 + plan.zeros),
            plgpu.Barrier(num_barriers=stages, num_arrivals=cut.warpgroups),
        )


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
        out_dtype: of the result; x's own by default.
        cut: how; by default what is good for most shapes.
        interpret: run on a CPU, in Pallas' interpreter.

    Raises:
        ValueError: for arrays that `supports_narrow` rejects.
    """
    (rows, inputs), outputs = x.shape, scale.shape[1]
    group = inputs // scale.shape[0]
    if not supports_narrow(rows, inputs, outputs, group) or x.dtype.itemsize != 2:
        raise ValueError(
            f"the kernel takes up to {MOST_NARROW_ROWS} rows of 16-bit floats, inputs in multiples "
            f"of 128, outputs in multiples of {BRICK} and groups of 32, 64 or multiples of 128, "
            f"got {x.dtype} {x.shape}, {outputs} outputs and groups of {group}: expand the weight"
        )
    kind = kind_of(words)
    # Rows of shared memory come in eights, and those of an array do too if it has more.
    padding = -rows % ROW_UNIT if rows > ROW_UNIT else 0
    x = jnp.pad(x, ((0, padding), (0, 0))) if padding else x
    cut = cut or cut_for(kind, rows, inputs, outputs, group)
    dtype = jnp.dtype(out_dtype or x.dtype)
    plan = Plan(
        cut=cut,
        kind=kind,
        m=rows + padding,
        k=inputs,
        n=outputs,
        group=group,
        zeros=zero is not None,
        dtype=jnp.dtype(x.dtype),
        out_dtype=jnp.dtype(jnp.float32) if cut.splits > 1 else dtype,
        interpreted=interpret is not None,
    )
    parts = (cut.splits,) if cut.splits > 1 else ()
    out = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        kernel_name="paged_matmul_narrow",
        out_type=jax.ShapeDtypeStruct((*parts, plan.m, outputs), plan.out_dtype),
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
    out = jnp.sum(out, axis=0).astype(dtype) if parts else out
    return out[:rows] if padding else out


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
        bricks = w_ref.at[
            pl.ds(unit.tile * cut.warpgroups, cut.warpgroups),
            pl.ds(step * plan.bricks, plan.bricks),
        ]
        plgpu.copy_gmem_to_smem(bricks, shared.w.at[slot], full)
        start = pl.multiple_of(step * cut.depth, cut.depth)
        rows = x_ref.at[pl.ds(0, plan.columns), pl.ds(start, cut.depth)]
        plgpu.copy_gmem_to_smem(rows, shared.x.at[slot], full)
        groups = pl.ds(lax.div(start, plan.group), plan.scale_rows)
        outputs = pl.ds(pl.multiple_of(unit.tile * plan.outputs, plan.outputs), plan.outputs)
        for i, ref in enumerate(scale_refs):
            plgpu.copy_gmem_to_smem(ref.at[groups, outputs], shared.scales.at[slot, i], full)
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


class Buffer(NamedTuple):
    """What one warpgroup finds in a buffer."""

    plan: Plan
    shared: Shared
    warpgroup: jax.Array | int
    slot: jax.Array | int

    def x(self, bricks: range) -> Ref:
        """The inputs of some bricks of a row, [64 n, columns]."""
        inputs = pl.ds(bricks.start * BRICK, len(bricks) * BRICK)
        return self.shared.x.at[self.slot, :, inputs].transpose((1, 0))

    def weight(self, bricks: range) -> jax.Array:
        """These bricks as floats of 16 bits, [64, 64 n]."""
        return self.unscaled(bricks) * self._of_groups(0, bricks)

    def unscaled(self, bricks: range) -> jax.Array:
        """The same without scales."""
        plan, ref = self.plan, self.shared.w.at[self.slot, self.warpgroup]
        ref = ref.at[pl.ds(bricks.start, len(bricks))]
        if plan.interpreted:
            weight = plan.kind.unpacked_slowly(ref[...], plan.dtype)
        else:
            words = plgpu.load(ref, layout=plan.kind.layout(len(bricks)))
            weight = plan.kind.unpacked(words, plan.dtype)
        return weight - self._of_groups(1, bricks) if plan.zeros else weight

    def of_group(self, which: int, group: int, shape: tuple[int, ...]) -> jax.Array:
        """Scales (0) or zeros (1) of a group, each output's all along its row."""
        outputs = pl.ds(self.warpgroup * BRICK, BRICK)
        row = self.shared.scales.at[self.slot, which, group, outputs]
        row = plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return lax.broadcast_in_dim(row, shape, [0])

    def _of_groups(self, which: int, bricks: range) -> jax.Array:
        """The same for each element of some bricks."""
        shape, run = (BRICK, len(bricks) * BRICK), self.plan.run
        start, stop = bricks.start * BRICK, bricks.stop * BRICK
        first, last = start // run, (stop - 1) // run
        values = self.of_group(which, first, shape)
        if last > first:
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            for group in range(first + 1, last + 1):
                later = self.of_group(which, group, shape)
                values = jnp.where(column >= group * run - start, later, values)
        return values


def _add_groups(buffer: Buffer, acc: jax.Array) -> jax.Array:
    """Multiply a buffer, and scale the sums of each group."""
    plan = buffer.plan
    each = plan.run // BRICK
    for group in range(plan.scale_rows):
        bricks = range(group * each, (group + 1) * each)
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
    first = unit.tile * plan.outputs + warpgroup * BRICK
    outputs = pl.ds(pl.multiple_of(first, BRICK), BRICK)
    buffer = shared.out.at[warpgroup]
    for row in range(0, plan.columns, plan.chunk):
        size = min(plan.chunk, plan.columns - row)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        turned = buffer.at[pl.ds(0, size)].transpose((1, 0))
        turned[...] = plgpu.layout_cast(
            acc[:, row : row + size].astype(plan.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, size)], out_ref.at[pl.ds(row, size), outputs])
