"""What both kernels do: score a span of positions, keep out what must not count, and join parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.attention.scoring import LOG2_E, Scoring
from paged.kernels import Ref

# Rows of a matrix that a warpgroup holds, and columns of a tile of 16-bit values in shared memory.
_ROWS, _COLUMNS = 64, 64


def scored(products: jax.Array, scoring: Scoring) -> tuple[jax.Array, float]:
    """What products q·k come to, and by what that is to be scaled for a softmax in powers of two.

    Apart, for a product with the scale can be fused with the subtraction that follows.
    """
    scale = scoring.scale * LOG2_E
    if scoring.soft_cap is None:
        return products, scale
    # tanh by exp2: the approximate instruction would be off in the third digit.
    power = jnp.exp2(products * (2 * scale / scoring.soft_cap))
    return 1 - 2 / (power + 1), scoring.soft_cap * LOG2_E


def clear_outside(values: Ref, first: jax.Array, begin: jax.Array, end: jax.Array) -> None:
    """Zero the values [span, D] of positions from `first` on that are not in [begin, end).

    Their weight is zero, but whatever a recycled page holds, NaN included, must reach no result,
    and zero times NaN is NaN.
    """
    span, head_dim = values.shape
    for offset in range(0, span, _ROWS):
        start = first + offset

        @pl.when((start + _ROWS > end) | (start < begin))
        def _(offset: int = offset, start: jax.Array = start) -> None:
            shape = (_ROWS, _COLUMNS)  # a tile at a time: registers are scarce here
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            readable = (start + row < end) & (start + row >= begin)
            for column in range(0, head_dim, _COLUMNS):
                part = values.at[pl.ds(offset, _ROWS), pl.ds(column, _COLUMNS)]
                part[...] = jnp.where(readable, part[...], jnp.zeros(shape, values.dtype))


def folded(
    running: tuple[jax.Array, jax.Array, jax.Array],
    parts: Sequence[jax.Array],
    log_sums: Sequence[jax.Array],
    wide: Callable[[jax.Array, tuple[int, ...]], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A running softmax with parts of it that were computed apart.

    Args:
        running: output, maximum and sum so far.
        parts: averages over values, of the output's shape; float32.
        log_sums: of each, the base-2 logarithm of the sum of weights in it, one for each query.
        wide: makes numbers for each query those of all its elements.
    """
    out, maximum, total = running
    new_maximum = functools.reduce(jnp.maximum, log_sums, maximum)
    decay = jnp.exp2(maximum - new_maximum)
    weights = [jnp.exp2(log_sum - new_maximum) for log_sum in log_sums]
    out *= wide(decay, out.shape)
    for weight, part in zip(weights, parts, strict=True):
        out += part * wide(weight, out.shape)
    return out, new_maximum, sum(weights, total * decay)
