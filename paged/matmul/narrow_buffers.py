"""What a program of `paged.matmul.narrow` has in shared memory, and how it finds weights there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.kernels import MULTIPROCESSORS, Ref, divide, swizzled
from paged.matmul.bricks import BRICK, Kind
from paged.matmul.cuts import MOST_RUN, scales_sums
from paged.matmul.tiling import ROW_UNIT, SHARED_BYTES, SHARED_BYTES_LOST, Cut

_MOST_STAGES = 12
# Rows of x whose results leave at once.
_CHUNK = 64


@dataclass(frozen=True)
class Plan:
    """A product and its cut: what is fixed when the kernel is compiled.

    Attributes:
        cut: see there.
        kind: how the weight is stored.
        m, k, n: x is [m, k], the output [m, n].
        group: inputs that share a scale.
        zeros: whether each group has a value for 0.
        gated: whether the first half of the n are gates of the others: the output is [m, n / 2].
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
    gated: bool
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
        """Of a program's tile: with gates, half of them are."""
        return BRICK * self.cut.warpgroups

    @property
    def parts(self) -> int:
        """Places in n that a tile is of."""
        return 2 if self.gated else 1

    @property
    def teams(self) -> int:
        """Warpgroups that give results: the others hand theirs to these."""
        return self.cut.warpgroups // self.parts

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
        """Inputs of a buffer that share a scale, and are multiplied at once where sums get it."""
        return min(self.group, self.cut.depth, MOST_RUN)

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
        room = SHARED_BYTES // cut.residents - SHARED_BYTES_LOST - out
        return min(_MOST_STAGES, room // stage, self.steps)


class Shared(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        x: [stages, columns, depth].
        w: [stages, warpgroups, bricks, *words].
        scales: [stages, 1, or 2 with zeros, parts, groups, outputs of a part].
        out: [warpgroups, chunk, 64].
        full, free: of the ring.
        handed, taken: of what warpgroups hand to others; None without gates.
    """

    x: Ref
    w: Ref
    scales: Ref
    out: Ref
    full: Ref
    free: Ref
    handed: Ref
    taken: Ref

    @staticmethod
    def types(plan: Plan) -> tuple[Any, ...]:
        cut, stages = plan.cut, plan.stages
        scales = (1 + plan.zeros, plan.parts, plan.scale_rows, plan.outputs // plan.parts)
        bricks = (cut.warpgroups, plan.bricks, *plan.kind.shape)
        return (
            plgpu.SMEM(
                (stages, plan.columns, cut.depth),
                plan.dtype,
                transforms=swizzled(BRICK, plan.dtype.itemsize),
            ),
            plgpu.SMEM((stages, *bricks), jnp.uint32),
            plgpu.SMEM((stages, *scales), plan.dtype),
            plgpu.SMEM((cut.warpgroups, plan.chunk, BRICK), plan.out_dtype),
            plgpu.Barrier(num_barriers=stages, num_arrivals=1 + (2 + plan.zeros) * plan.parts),
            plgpu.Barrier(num_barriers=stages, num_arrivals=cut.warpgroups),
            *(plgpu.Barrier(num_barriers=plan.teams) if plan.gated else None for _ in range(2)),
        )


class Buffer(NamedTuple):
    """What one warpgroup finds in a buffer.

    Attributes:
        plan, shared: of the program.
        warpgroup: which.
        slot: of the ring.
    """

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
        part, team = divide(self.warpgroup, self.plan.teams)
        outputs = pl.ds(team * BRICK, BRICK)
        row = self.shared.scales.at[self.slot, which, part, group, outputs]
        row = plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return lax.broadcast_in_dim(row, shape, [0])

    def _of_groups(self, which: int, bricks: range) -> jax.Array:
        """The same for each element of some bricks."""
        shape, size = (BRICK, len(bricks) * BRICK), self.plan.group
        start, stop = bricks.start * BRICK, bricks.stop * BRICK
        first, last = start // size, (stop - 1) // size
        values = self.of_group(which, first, shape)
        if last > first:
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            for group in range(first + 1, last + 1):
                later = self.of_group(which, group, shape)
                values = jnp.where(column >= group * size - start, later, values)
        return values
