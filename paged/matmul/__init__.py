"""Products with weights on Hopper GPUs, and what follows them: a sum, or silu of a gate.

A caller asks `supports` whether the kernel takes its arrays, and `tiling_for` whether it is faster
than XLA for their shapes; both answer while a program is traced. `matmul` is the product itself.

Axis letters used here: M rows, K inputs, N outputs, F outputs of a gated product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.matmul.bricks import BRICK, FP8, INT4
from paged.matmul.choice import grouped_tiling_for, scaled_tiling_for, tiling_for
from paged.matmul.codes import grouped_codes_matmul, supports_codes
from paged.matmul.expand import expanded
from paged.matmul.grouping import MOST_ROWS, in_groups_at_once
from paged.matmul.groups import Groups, Order, in_groups
from paged.matmul.hopper import hopper_matmul
from paged.matmul.narrow import MOST_NARROW_ROWS, narrow_matmul, supports_narrow
from paged.matmul.rows import LARGEST, scaled_rows
from paged.matmul.tiling import ROW_UNIT, Tiling

__all__ = [
    "BRICK",
    "FP8",
    "INT4",
    "LARGEST",
    "MOST_NARROW_ROWS",
    "MOST_ROWS",
    "ROW_UNIT",
    "Groups",
    "Order",
    "Tiling",
    "available",
    "expanded",
    "grouped_codes_matmul",
    "grouped_matmul",
    "grouped_tiling_for",
    "in_groups",
    "in_groups_at_once",
    "matmul",
    "narrow_matmul",
    "scaled_matmul",
    "scaled_rows",
    "scaled_tiling_for",
    "supports",
    "supports_codes",
    "supports_groups",
    "supports_narrow",
    "supports_scaled",
    "tiling_for",
]


def available(device: jax.Device) -> bool:
    """Whether a device can run the kernel: it must be a Hopper GPU."""
    is_gpu = device.platform in ("gpu", "cuda")
    return is_gpu and str(getattr(device, "compute_capability", "")) == "9.0"


def supports(x: jax.Array | jax.ShapeDtypeStruct, w: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether the kernel takes x [M, K] and w [K, N] or [K, 2, F].

    Both must be the same 16-bit float, and K and N or F multiples of 64: rows of 128 bytes.
    """
    half = x.dtype == w.dtype and x.dtype in (jnp.bfloat16, jnp.float16)
    flat_or_gated = w.ndim == 2 or (w.ndim == 3 and w.shape[1] == 2)
    return half and flat_or_gated and w.shape[0] % 64 == 0 and w.shape[-1] % 64 == 0


def supports_groups(dtype: jnp.dtype, w: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether the kernel takes rows of `dtype` and w [X, K, N] or [X, K, 2, F]; see `supports`."""
    each = jax.ShapeDtypeStruct(w.shape[1:], w.dtype)
    return supports(jax.ShapeDtypeStruct((ROW_UNIT, each.shape[0]), dtype), each)


def matmul(
    x: jax.Array,
    w: jax.Array,
    tiling: Tiling,
    *,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [M, K] times w, accumulated in float32.

    Args:
        w: [K, N] gives [M, N]; gate and up [K, 2, F] give silu(x w[:, 0]) * (x w[:, 1]), [M, F].
        tiling: of `tiling_for`. Its depth times its splits must divide K.
        residual: [M, N] to add, before the result is rounded.
        out_dtype: of the result; x's own by default.
        interpret: run on a CPU, in Pallas' interpreter.

    Raises:
        ValueError: for arrays that `supports` rejects, and for a tiling that cuts them unevenly.
    """
    _check(x, w, tiling)
    dtype = jnp.dtype(out_dtype or x.dtype)
    m, padding = x.shape[0], _row_padding(x.shape[0])
    if padding:
        x = _pad(x, padding)
        residual = None if residual is None else _pad(residual, padding)
    if tiling.splits > 1:
        out = hopper_matmul(x, w, tiling, out_dtype=jnp.float32, interpret=interpret)
        out = jnp.sum(out, axis=0)
        out = (out if residual is None else out + residual.astype(jnp.float32)).astype(dtype)
    else:
        out = hopper_matmul(x, w, tiling, residual=residual, out_dtype=dtype, interpret=interpret)
    return out[:m] if padding else out


def supports_scaled(
    x: jax.Array | jax.ShapeDtypeStruct, w: jax.Array | jax.ShapeDtypeStruct
) -> bool:
    """Whether `scaled_matmul` takes values [M, K] and weights [N, K] or [2, F, K] of 8 bits.

    Both must be float8_e4m3fn or both int8, K a multiple of 128, and N or F of 64.
    """
    narrow = x.dtype == w.dtype and x.dtype in (jnp.float8_e4m3fn, jnp.int8)
    flat_or_gated = w.ndim == 2 or (w.ndim == 3 and w.shape[0] == 2)
    return narrow and flat_or_gated and w.shape[-1] % 128 == 0 and w.shape[-2] % 64 == 0


def scaled_matmul(
    x: jax.Array,
    w: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    tiling: Tiling,
    *,
    out_dtype: jnp.dtype,
    residual: jax.Array | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [M, K] times w, both of 8 bits, times their scales.

    Args:
        w: [N, K] gives [M, N]; gate and up [2, F, K] give silu(x w[0]) * (x w[1]), [M, F].
        scales: [M] of x, and [N] or [2, F] of w, float32.
        tiling: of `scaled_tiling_for`. Its depth times its splits must divide K.
        out_dtype: of the result.
        residual: [M, N] to add, before the result is rounded.
        interpret: run on a CPU, in Pallas' interpreter.

    Raises:
        ValueError: for arrays that `supports_scaled` rejects, and for a tiling that cuts them
            unevenly.
    """
    if not supports_scaled(x, w):
        raise ValueError(
            "the kernel multiplies float8_e4m3fn or int8 whose K is a multiple of 128 and whose N "
            f"is one of 64, got {x.dtype} {x.shape} and {w.dtype} {w.shape}: leave these to XLA"
        )
    _check_tiling(w.shape[-1], w.ndim == 3, tiling)
    m, padding = x.shape[0], _row_padding(x.shape[0])
    if padding:
        x, scales = _pad(x, padding), (jnp.pad(scales[0], (0, padding)), scales[1])
        residual = None if residual is None else _pad(residual, padding)
    if tiling.splits > 1:
        out = hopper_matmul(x, w, tiling, out_dtype=jnp.dtype(jnp.float32), interpret=interpret)
        out = jnp.sum(out, axis=0) * scales[0][:, None] * scales[1]
        out = (out if residual is None else out + residual.astype(jnp.float32)).astype(out_dtype)
    else:
        out = hopper_matmul(
            x,
            w,
            tiling,
            residual=residual,
            scales=scales,
            out_dtype=out_dtype,
            interpret=interpret,
        )
    return out[:m] if padding else out


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    groups: Groups,
    tiling: Tiling,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [M, K], whose rows come in groups, times each group's own of the weights w.

    M and the groups' sizes must be multiples of `ROW_UNIT`. Groups without rows cost nothing.

    Args:
        w: [X, K, N] gives [M, N]; gate and up [X, K, 2, F] give [M, F], as in `matmul`.
        tiling: of `grouped_tiling_for`. Its depth times its splits must divide K.
        interpret: run on a CPU, in Pallas' interpreter.

    Returns:
        The products in x's dtype. What nobody's rows become is not specified.

    Raises:
        ValueError: for arrays that `supports_groups` rejects, and for a tiling that cuts them
            unevenly.
    """
    _check(x, jax.eval_shape(lambda: w[0]), tiling)
    if x.shape[0] % ROW_UNIT:
        raise ValueError(f"rows must be a multiple of {ROW_UNIT}, got {x.shape[0]}: pad them")
    dtype = jnp.dtype(jnp.float32 if tiling.splits > 1 else x.dtype)
    out = hopper_matmul(x, w, tiling, groups=groups, out_dtype=dtype, interpret=interpret)
    return jnp.sum(out, axis=0).astype(x.dtype) if tiling.splits > 1 else out


def _row_padding(m: int) -> int:
    """Rows of shared memory come in eights, and those of an array do too if it has more."""
    return -m % 8 if m > 8 else 0


def _pad(rows: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(rows, ((0, padding), (0, 0)))


def _check(x: jax.Array, w: jax.Array, tiling: Tiling) -> None:
    if not supports(x, w):
        raise ValueError(
            f"the kernel multiplies 16-bit floats of one kind whose K and N are multiples of 64, "
            f"got {x.dtype} {x.shape} and {w.dtype} {w.shape}: leave these to XLA"
        )
    _check_tiling(w.shape[0], w.ndim == 3, tiling)


def _check_tiling(k: int, gated: bool, tiling: Tiling) -> None:
    if gated and tiling.splits > 1:
        raise ValueError(f"a gated product cannot be summed later, got {tiling.splits} splits")
    if k % (tiling.depth * tiling.splits):
        raise ValueError(
            f"K must be a multiple of depth times splits, got {k} with {tiling.depth} "
            f"times {tiling.splits}: ask tiling_for"
        )
