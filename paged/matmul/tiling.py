"""How a product is cut into pieces for the multiprocessors of a Hopper GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.experimental import pallas as pl

from paged.kernels import MULTIPROCESSORS

# Rows of a warpgroup's accumulator: what its tensor cores multiply at a time.
ROWS = 64
# Shared memory of a multiprocessor, and what each program costs besides its own: its barriers too.
SHARED_BYTES, SHARED_BYTES_LOST = 233472, 2048
# More buffers than this hide nothing more.
_MAX_STAGES = 12
# Buffers through which a warpgroup's output leaves.
OUTPUT_SLOTS = 2
# Row tiles after which the next columns follow: what they read of x stays in the cache.
_STRIPE = 8
# With groups more, for the weights of a group are to be read once: 16 of 128 rows, and as many
# programs as there are multiprocessors, read about as much of x as of the weight.
_STRIPE_OF_GROUPS = 16
# Rows of x come in eights, or those of each group of them, as rows of shared memory do.
ROW_UNIT = 8


@dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes:
        widths: columns of the weight in a warpgroup's accumulators, one after the other: a program
            computes the columns of the first for all of K, then those of the second.
        row_warpgroups, column_warpgroups: that multiply.
        row_cluster, column_cluster: programs of a cluster.
        depth: elements of K in a buffer.
        splits: parts of K, each summed apart.
        residents: programs that a multiprocessor runs at a time.
    """

    widths: tuple[int, ...] = (256,)
    row_warpgroups: int = 2
    column_warpgroups: int = 1
    row_cluster: int = 1
    column_cluster: int = 1
    depth: int = 64
    splits: int = 1
    residents: int = 1

    @property
    def height(self) -> int:
        """Rows of x that a program takes."""
        return ROWS * self.row_warpgroups

    @property
    def warpgroups(self) -> int:
        """Those that multiply."""
        return self.row_warpgroups * self.column_warpgroups

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return self.row_cluster * self.column_cluster


@dataclass(frozen=True)
class Cut:
    """How a product with weights out of registers is cut.

    Attributes:
        warpgroups: that multiply, each 64 outputs.
        splits: parts of K, each summed apart.
        depth: inputs in a buffer.
        residents: programs that a multiprocessor runs at a time.
    """

    warpgroups: int = 2
    splits: int = 1
    depth: int = 128
    residents: int = 1


def most_tiles(rows: int, groups: int, height: int) -> int:
    """Row tiles that groups of `rows` in all are cut into at most, none of which has two groups."""
    return min(rows // ROW_UNIT, rows // height + groups)


@dataclass(frozen=True)
class Plan:
    """A product and its tiling: what is fixed when the kernel is compiled.

    Attributes:
        tiling: see there.
        m, k, n: x is [m, k], the output [m, n].
        gated: the weight is [k, 2, n], all gates before all that they gate, not [k, n].
        residual: an [m, n] array is added.
        scaled: the products are multiplied by a scale for each row and each column.
        dtype: of the operands.
        out_dtype: of the output.
        interpreted: whether Pallas' interpreter runs the kernel.
        groups: of rows, each of which has a weight of its own; 0 if all have the same.
        most: rows that a group has at most.
    """

    tiling: Tiling
    m: int
    k: int
    n: int
    gated: bool
    residual: bool
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    interpreted: bool
    scaled: bool = False
    groups: int = 0
    most: int = 0

    @property
    def halves(self) -> int:
        """Columns of the weight for a column of the output."""
        return 2 if self.gated else 1

    @property
    def out_widths(self) -> tuple[int, ...]:
        """Columns of the output that a warpgroup computes, one after the other."""
        return tuple(width // self.halves for width in self.tiling.widths)

    @property
    def depth_last(self) -> bool:
        """Whether the weight comes as [n, k] or [2, n, k]: so it must where it has 8 bits."""
        return self.dtype.itemsize == 1

    @property
    def sum_dtype(self) -> jnp.dtype:
        """What the products are summed in."""
        return jnp.dtype(jnp.int32 if self.dtype == jnp.int8 else jnp.float32)

    @property
    def swizzle(self) -> int:
        """Elements of a swizzled row of the operands in shared memory."""
        return 128 if self.depth_last else math.gcd(64, *self.out_widths)

    @property
    def column_unit(self) -> int:
        """What divides the first column of every tile."""
        return math.gcd(64, *self.out_widths)

    @property
    def chunk(self) -> int:
        """Columns of the output that leave at once, at most 128 bytes of a row."""
        return math.gcd(128 // self.out_dtype.itemsize, self.n, *self.out_widths)

    @property
    def rows_loaded(self) -> int:
        """Rows of x that a warpgroup's accumulator has: few tokens do not fill it."""
        most = min(self.m, self.most) if self.groups else self.m
        return min(ROWS, pl.cdiv(most, 8) * 8)

    @property
    def row_tiles(self) -> int:
        """How many cover the output from top to bottom, each of a cluster; with groups, at most."""
        if self.groups:
            return most_tiles(self.m, self.groups, self.tiling.height)
        return pl.cdiv(self.m, self.tiling.height * self.tiling.row_cluster)

    @property
    def columns(self) -> int:
        """Columns of the output that a program computes for its rows."""
        return sum(self.out_widths) * self.tiling.column_warpgroups

    @property
    def stripe(self) -> int:
        """Row tiles that are computed for all columns before the next."""
        return _STRIPE_OF_GROUPS if self.groups else math.gcd(self.row_tiles, _STRIPE)

    @property
    def column_tiles(self) -> int:
        """How many cover the output from left to right, each of a cluster."""
        return pl.cdiv(self.n, self.columns * self.tiling.column_cluster)

    @property
    def tiles(self) -> int:
        """All of them, for every part of K."""
        return self.row_tiles * self.column_tiles * self.tiling.splits

    @property
    def clusters(self) -> int:
        """Clusters that share the tiles."""
        most = MULTIPROCESSORS * self.tiling.residents // self.tiling.cluster
        return min(self.tiles, most)

    @property
    def steps(self) -> int:
        """Buffers that a warpgroup's accumulator takes."""
        return self.k // (self.tiling.depth * self.tiling.splits)

    @property
    def stages(self) -> int:
        """Buffers of the ring: as many as there is memory for."""
        tile, item = self.tiling, self.dtype.itemsize
        width = max(tile.widths)
        weight = tile.column_warpgroups * self.buffer_rows(width) * width * item
        stage = tile.height * tile.depth * item + weight
        free = SHARED_BYTES // tile.residents - SHARED_BYTES_LOST - self._output_bytes
        free -= self._scale_bytes
        return min(_MAX_STAGES, free // stage, self.steps)

    @property
    def _output_bytes(self) -> int:
        staged = self.tiling.warpgroups * OUTPUT_SLOTS * ROWS * self.chunk
        return staged * self.out_dtype.itemsize

    @property
    def _scale_bytes(self) -> int:
        floats = self.tiling.warpgroups * (ROWS + max(self.tiling.widths))
        return 4 * floats if self.scaled else 0

    def buffer_rows(self, width: int) -> int:
        """Rows of a weight buffer `width` columns wide: all buffers of a ring are one size."""
        depth, widths = self.tiling.depth, self.tiling.widths
        unit = math.lcm(*(8 * width for width in widths))
        return pl.cdiv(depth * max(widths), unit) * unit // width
