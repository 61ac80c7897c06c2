"""What decoding computes: a softmax over positions in rows, with a query head in each column.

Tensor cores take 64 rows, but as few as 8 columns, and few query heads share a key/value head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.attention.mosaic.spans import scored
from paged.attention.mosaic.words import columns_of_tile, halves
from paged.attention.mosaic.worklist import SPAN, Item
from paged.attention.scoring import LOG2_E, LOWEST, MASKED, Scoring
from paged.kernels import Ref


@dataclass(frozen=True)
class Spec:
    """What is fixed when the kernels are compiled.

    Attributes:
        group: query heads that share one key/value head (G).
        columns: the group padded to a multiple of 8 (N).
        kv_heads: key/value heads (Hkv).
        head_dim: elements of a head (D).
        latent_rank: elements of the latent of a row, see `paged.cache.Pages`; or None.
        page_size: tokens a page holds.
        pages_per_table: P.
        buffers: those of the ring; keys and values, if there are both, take turns in them.
        programs: those that share the work of the same head.
        scoring: see `Scoring`.
        dtype: of what is multiplied.
        out_dtype: of output.
        page_dtype: of what pages hold.
        interpreted: whether Pallas' interpreter runs the kernels.
    """

    group: int
    columns: int
    kv_heads: int
    head_dim: int
    latent_rank: int | None
    page_size: int
    pages_per_table: int
    buffers: int
    programs: int
    scoring: Scoring
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    page_dtype: jnp.dtype
    interpreted: bool

    @property
    def narrow(self) -> bool:
        """Whether pages hold values of 8 bits, in words of two."""
        return self.page_dtype.itemsize == 1

    @property
    def row(self) -> int:
        """Elements of a head as pages hold it."""
        return self.head_dim // 2 if self.narrow else self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of a value."""
        return self.latent_rank or self.head_dim

    @property
    def kinds(self) -> int:
        """Buffers of a span: keys and values have each their own, latents are both."""
        return 1 if self.latent_rank is not None else 2

    @property
    def copies(self) -> int:
        """Copies that fill a buffer: one a page, or a part of one."""
        return max(SPAN // self.page_size, 1)

    def by_columns(self, x: jax.Array) -> jax.Array:
        """[.., Hq, x] as [.., Hkv, N, x], with zeros for query heads that there are none of."""
        x = x.reshape(*x.shape[:-2], self.kv_heads, self.group, x.shape[-1])
        padding = [(0, 0)] * x.ndim
        padding[-2] = (0, self.columns - self.group)
        return jnp.pad(x, padding)


# Output [elements, N], maximum [N] and sums [span, N] of the softmax so far, in powers of two.
Running = tuple[jax.Array, jax.Array, jax.Array]
# Of what has a query head in each column.
COLUMN = plgpu.Layout.WGMMA.reduce(0)


def wide(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each column, for the elements of a matrix."""
    return lax.broadcast_in_dim(row, shape, [1])


def start(head: jax.Array, item: Item, sinks_ref: Ref | None, spec: Spec) -> Running:
    """The softmax over nothing, or over the sinks where the item begins a row."""
    shape = (SPAN, spec.columns)
    out = plgpu.layout_cast(
        jnp.zeros((spec.value_dim, spec.columns), jnp.float32), plgpu.Layout.WGMMA
    )
    maximum = plgpu.layout_cast(jnp.full(spec.columns, LOWEST, jnp.float32), COLUMN)
    if sinks_ref is None:
        sums = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return out, maximum, sums
    begins = item.begins_row(lax.axis_index("program"))
    sinks = plgpu.load(sinks_ref.at[head], layout=COLUMN, optimized=False) * LOG2_E
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    sums = jnp.where((row == 0) & begins, jnp.float32(1), jnp.float32(0))
    return out, jnp.where(begins, sinks, maximum), sums


def products_of(keys: Ref, queries: Ref, spec: Spec) -> jax.Array:
    """k·q [span, N] of keys [span, D] as the ring holds them, and queries [N, D]."""
    multiply = functools.partial(_multiply_words if spec.narrow else _multiply, keys, queries, spec)
    shape = (SPAN, spec.columns)
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _multiply(keys: Ref, queries: Ref, spec: Spec, products: Ref) -> jax.Array:
    plgpu.wgmma(products, keys, queries.transpose((1, 0)))
    return products[...]


def _multiply_words(keys: Ref, queries: Ref, spec: Spec, products: Ref) -> jax.Array:
    """Tile by tile, for the registers of all keys would leave no room for another program."""
    columns = columns_of_tile(spec.row)
    total = jnp.zeros(products.shape, jnp.float32)
    for begin in range(0, spec.row, columns):
        words = plgpu.load(keys.at[:, pl.ds(begin, columns)], layout=plgpu.Layout.WGMMA)
        for n, half in enumerate(halves(words, spec.page_dtype, interpreted=spec.interpreted)):
            part = queries.at[:, pl.ds(n * spec.row + begin, columns)]
            if spec.interpreted:  # knows no products of registers
                total += jnp.dot(half.astype(jnp.float32), part[...].astype(jnp.float32).T)
            else:
                plgpu.wgmma(products, half, part.transpose((1, 0)))
        if begin + columns < spec.row and not spec.interpreted:
            plgpu.wgmma_wait(0)
    return total if spec.interpreted else products[...]


def softmax(
    running: Running, products: jax.Array, begin: jax.Array, item: Item, spec: Spec
) -> tuple[Running, jax.Array]:
    """The running softmax scaled for products k·q [span, N] from position `begin`, and weights."""
    out, maximum, sums = running
    products, scale = scored(products, spec.scoring)
    row = plgpu.broadcasted_iota(jnp.int32, products.shape, 0, layout=plgpu.Layout.WGMMA)
    visible = (row >= item.begin - begin) & (row < item.end - begin)
    products = jnp.where(visible, products, MASKED)
    new_maximum = jnp.maximum(maximum, products.max(axis=0) * scale)
    decay = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(products * scale - wide(new_maximum, products.shape))
    out *= wide(decay, out.shape)
    sums = sums * wide(decay, sums.shape) + weights
    return (out, new_maximum, sums), weights.astype(spec.dtype)


def accumulate(running: Running, values: Ref, weights: Ref, spec: Spec) -> Running:
    """Add the weighted values [span, elements]."""
    out, maximum, sums = running
    if spec.interpreted:  # knows no accumulator that starts with a value
        left, right = (ref[...].astype(jnp.float32) for ref in (values, weights))
        return out + jnp.dot(left.T, right.T), maximum, sums

    def add(accumulator: Ref) -> None:
        plgpu.wgmma(accumulator, values.transpose((1, 0)), weights.transpose((1, 0)))

    return pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(out)), maximum, sums


def store_rows(out: jax.Array, rows: Ref, out_ref: Ref, head: jax.Array, spec: Spec) -> None:
    """Copy `out` [.., N] by way of `rows` [N, ..] to the group's rows of `out_ref` [Hq, ..]."""
    rows.transpose((1, 0))[...] = plgpu.layout_cast(
        out.astype(spec.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED
    )
    plgpu.commit_smem()
    group = out_ref.at[pl.ds(head * spec.group, spec.group)]
    plgpu.copy_smem_to_gmem(rows.at[pl.ds(0, spec.group)], group)
    plgpu.wait_smem_to_gmem(0)
