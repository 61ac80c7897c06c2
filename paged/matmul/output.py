"""What a program of `paged.matmul.hopper` has, and how its accumulators leave it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.kernels import Ref
from paged.matmul.tiling import OUTPUT_SLOTS, ROW_UNIT, ROWS, Plan


class Shared(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        x: [stages, row warpgroups, rows, depth].
        w: for each width the ring, [stages, column warpgroups, buffer rows, width]; where the
            depth comes last one ring for all, [stages, column warpgroups, largest width, depth].
        w_halves: the same memory as [..., buffer rows, 2, width / 2]; empty without gates.
        out: [warpgroups, OUTPUT_SLOTS, rows, chunk].
        full, free: of the ring.
        added: the residual's copies have arrived.
        row_scales: [warpgroups, rows].
        column_scales: [warpgroups, halves, columns].
        scaled: the scales have arrived.
    """

    x: Ref
    w: tuple[Ref, ...]
    w_halves: tuple[Ref, ...]
    out: Ref
    full: Ref
    free: Ref
    added: Ref
    row_scales: Ref
    column_scales: Ref
    scaled: Ref


class Tile(NamedTuple):
    """An output tile of a program.

    Attributes:
        split, row, column: where it starts; `split` is a part of K.
        done: tiles that the program did before.
        end: where the rows of its group end; None if all rows have one weight.
        weight: where the weight of its group starts.
    """

    split: jax.Array
    row: jax.Array
    column: jax.Array
    done: jax.Array
    end: jax.Array | None = None
    weight: jax.Array | int = 0


def span(start: jax.Array | int, size: int, unit: int | None = None) -> pl.Slice:
    """A slice of `size` from `start` on, which `unit` divides, or else `size` does."""
    if isinstance(start, int):
        return pl.ds(start, size)
    return pl.ds(pl.multiple_of(start, unit or size), size)


class Output(NamedTuple):
    """Where a warpgroup's accumulator goes: from `row` and `column`, `width` columns."""

    warpgroup: jax.Array
    residual_ref: Ref | None
    scale_refs: tuple[Ref, Ref] | None
    out_ref: Ref
    shared: Shared
    plan: Plan
    place: Tile
    row: jax.Array
    column: jax.Array
    width: int

    def begin(self) -> None:
        """Start to copy the scales, and what is to be added."""
        if self.scale_refs is not None:
            self._copy_scales(*self.scale_refs)
        if self.residual_ref is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for c in range(min(OUTPUT_SLOTS, self._chunks)):
                self._copy_residual(c)

    def store(self, acc: jax.Array) -> None:
        """Finish the accumulator, chunk by chunk."""
        if self.scale_refs is not None:
            plgpu.barrier_wait(self.shared.scaled.at[self.warpgroup])
        for c in range(self._chunks):
            buffer = self.shared.out.at[self.warpgroup, c % OUTPUT_SLOTS]
            values = self._values(acc, c)
            if self.residual_ref is None:
                plgpu.wait_smem_to_gmem(OUTPUT_SLOTS - 1, wait_read_only=True)
            else:
                plgpu.barrier_wait(self.shared.added.at[self.warpgroup, c % OUTPUT_SLOTS])
                added = plgpu.load(buffer, layout=plgpu.Layout.WGMMA)
                values = values + added.astype(jnp.float32)
            buffer[...] = values.astype(self.plan.out_dtype)
            plgpu.commit_smem()
            self._copy_out(c)
            if self.residual_ref is not None and c + OUTPUT_SLOTS < self._chunks:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._copy_residual(c + OUTPUT_SLOTS)

    @property
    def _chunks(self) -> int:
        return self.width // self.plan.chunk

    def _values(self, acc: jax.Array, c: int) -> jax.Array:
        if not self.plan.gated:
            return self._part(acc, 0, c)
        gate, up = self._part(acc, 0, c), self._part(acc, 1, c)
        return gate * up / (1 + jnp.exp(-gate))

    def _part(self, acc: jax.Array, half: int, c: int) -> jax.Array:
        """A chunk of one half of the accumulator, in float32 and scaled."""
        first, chunk = half * self.width + c * self.plan.chunk, self.plan.chunk
        part = acc[:, first : first + chunk].astype(jnp.float32)
        if self.scale_refs is None:
            return part
        columns = self.shared.column_scales.at[
            self.warpgroup, half, pl.ds(c * self.plan.chunk, chunk)
        ]
        of_rows = self._load(self.shared.row_scales.at[self.warpgroup], 1)
        of_columns = self._load(columns, 0)
        part = part * lax.broadcast_in_dim(of_rows, part.shape, [0])
        return part * lax.broadcast_in_dim(of_columns, part.shape, [1])

    def _load(self, scales: Ref, axis: int) -> jax.Array:
        """As the accumulator lies in registers, without one of its axes."""
        return plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(axis), optimized=False)

    def _copy_scales(self, of_rows: Ref, of_columns: Ref) -> None:
        barrier = self.shared.scaled.at[self.warpgroup]
        rows = self.shared.row_scales.at[self.warpgroup]
        plgpu.copy_gmem_to_smem(of_rows.at[span(self.row, ROWS)], rows, barrier)
        columns = span(self.column, self.width, self.plan.column_unit)
        for half in range(self.plan.halves):
            source = of_columns.at[half, columns] if self.plan.gated else of_columns.at[columns]
            target = self.shared.column_scales.at[self.warpgroup, half, pl.ds(0, self.width)]
            plgpu.copy_gmem_to_smem(source, target, barrier)

    def _copy_residual(self, c: int) -> None:
        barrier = self.shared.added.at[self.warpgroup, c % OUTPUT_SLOTS]
        rows = self.plan.rows_loaded
        plgpu.copy_gmem_to_smem(
            self._place(self.residual_ref, c, 0, rows), self._staged(c, 0, rows), barrier
        )

    def _copy_out(self, c: int) -> None:
        def copy(first: jax.Array | int, rows: int) -> None:
            plgpu.copy_smem_to_gmem(
                self._staged(c, first, rows), self._place(self.out_ref, c, first, rows)
            )

        def copy_few(i: jax.Array, carry: jax.Array) -> jax.Array:
            copy(i * ROW_UNIT, ROW_UNIT)
            return carry

        rows = self.plan.rows_loaded
        if self.place.end is None:
            copy(0, rows)
            return
        left = self.place.end - self.row
        pl.when(left >= rows)(lambda: copy(0, rows))

        @pl.when(left < rows)
        def _() -> None:
            lax.fori_loop(0, lax.div(left, ROW_UNIT), copy_few, jnp.int32(0))

    def _staged(self, c: int, first: jax.Array | int, rows: int) -> Ref:
        return self.shared.out.at[self.warpgroup, c % OUTPUT_SLOTS, span(first, rows, 8)]

    def _place(self, ref: Ref, c: int, first: jax.Array | int, count: int) -> Ref:
        rows = span(self.row + first, count, 8)
        columns = span(self.column + c * self.plan.chunk, self.plan.chunk)
        split = self.plan.tiling.splits > 1
        return ref.at[self.place.split, rows, columns] if split else ref.at[rows, columns]
