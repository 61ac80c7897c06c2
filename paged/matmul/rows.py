"""Rows of activations in 8 bits, in one pass over them, in the Triton form of Pallas."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.kernels import Ref

# The largest magnitude that values of a dtype are scaled to.
LARGEST = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.int8): 127.0}
# A float32 this large has no digits behind the point. (Triton has no rounding; XLA, which runs the
# interpreter, would see through this.)
_WHOLE = 1.5 * 2**23
# Elements of a row for which a program gets one more warp, and the most that it has.
_OF_A_WARP, _MOST_WARPS = 1024, 16


def scaled_rows(
    x: jax.Array, dtype: jnp.dtype, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """x [M, K] in `dtype`, each row scaled to fill its range, and the scales [M] float32.

    `dtype` is float8_e4m3fn or int8.
    """
    rows, size = x.shape
    width = pl.next_power_of_2(size)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    warps = max(4, min(_MOST_WARPS, width // _OF_A_WARP))
    return pl.pallas_call(
        partial(_kernel, size=size, width=width, dtype=dtype, interpret=interpret),
        grid=(rows,),
        in_specs=[whole],
        out_specs=[whole] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="paged_scaled_rows",
    )(x)


def _kernel(
    x_ref: Ref,
    values_ref: Ref,
    scale_ref: Ref,
    *,
    size: int,
    width: int,
    dtype: jnp.dtype,
    interpret: bool,
) -> None:
    """One row."""
    row = pl.program_id(0)
    columns = jnp.arange(width)
    there = columns < size
    x = plgpu.load(x_ref.at[row, columns], mask=there, other=0.0).astype(jnp.float32)
    scale = jnp.max(jnp.abs(x)) / LARGEST[dtype]
    scale = jnp.where(scale > 0, scale, 1.0)
    values = x / scale
    if dtype == jnp.int8:  # to the nearest
        values = jnp.round(values) if interpret else (values + _WHOLE) - _WHOLE
    plgpu.store(values_ref.at[row, columns], values.astype(dtype), mask=there)
    plgpu.store(scale_ref.at[row], scale)
