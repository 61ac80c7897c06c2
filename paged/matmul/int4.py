"""Products of a few rows with weights of 4 bits in groups, unpacked without integer conversions.

bfloat16 with the bits 0x4300 + n is the number 128 + n, for n up to 127; float16 with 0x6400 + n is
1024 + n. So one instruction makes two weights of a word with four values in it, and one subtraction
takes what they have too much: converting integers instead, a kernel is bound by that and no faster
than on weights of 16 bits.

Axis letters, besides those of `paged.matmul`: H bytes of a unit, which hold the values of 2 * H
inputs: those of the first half in their low bits, those of the second in their high ones.
"""

from __future__ import annotations

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.kernels import MULTIPROCESSORS, Ref, divide

INT4_ROWS = 128
"""Rows up to which the kernel is faster than to expand the weight for a product of 16 bits."""

INT4_UNIT = 128
"""Most inputs of a unit."""

_COLUMNS = 128
_MIDDLE = 8
_MOST_SPLITS = 8
_SMALLEST_UNIT = 32

# Of four bytes: their low halves, or once shifted their high ones, as four floats less 8.
_UNPACK = """{{
.reg .b32 a, b, m;
mov.b32 m, 0x{bits}08{bits}08;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
{shift}
lop3.b32 a, a, 0x000F000F, 0x{bits}00{bits}00, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x{bits}00{bits}00, 0xEA;
sub.rn.{kind}x2 $0, a, m;
sub.rn.{kind}x2 $1, b, m;
}}"""
_KINDS = {
    jnp.dtype(jnp.bfloat16): {"kind": "bf16", "bits": "43"},
    jnp.dtype(jnp.float16): {"kind": "f16", "bits": "64"},
}
_SHIFT = "shr.b32 a, a, 4;\nshr.b32 b, b, 4;"


def int4_unit(group: int) -> int:
    """Inputs whose values share bytes, where so many share a scale."""
    return gcd(group, INT4_UNIT)


def supports_int4(x: jax.Array, packed: jax.Array, scale: jax.Array) -> bool:
    """Whether the kernel takes x [M, K], packed [K / 2, N] and scale [K / group, N]."""
    (rows, inputs), outputs = x.shape, packed.shape[1]
    unit = int4_unit(inputs // scale.shape[0])
    return (
        jnp.dtype(x.dtype) in _KINDS
        and rows <= INT4_ROWS
        and unit >= _SMALLEST_UNIT
        and outputs % _COLUMNS == 0
    )


def int4_matmul(
    x: jax.Array, packed: jax.Array, scale: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """x [M, K] times (value - 8) * scale, [M, N] float32.

    Args:
        x: a float of 16 bits.
        packed: [K / 2, N] uint8.
        scale: [K / group, N].
        interpret: run on a CPU, in Pallas' interpreter.

    Raises:
        ValueError: for arrays that `supports_int4` rejects.
    """
    if not supports_int4(x, packed, scale):
        raise ValueError(
            f"the kernel takes up to {INT4_ROWS} rows of 16-bit floats, groups that "
            f"{_SMALLEST_UNIT} divides and outputs in multiples of {_COLUMNS}, got {x.dtype} "
            f"{x.shape}, {packed.shape} and {scale.shape}: expand these weights"
        )
    (rows, inputs), outputs = x.shape, packed.shape[1]
    group = inputs // scale.shape[0]
    unit = int4_unit(group)
    tile = min(max(16, pl.next_power_of_2(rows)), 64)
    tiles, columns = pl.cdiv(rows, tile), outputs // _COLUMNS
    splits = _splits(inputs // unit, tiles * columns)
    kernel = partial(
        _kernel,
        rows=rows,
        tile=tile,
        half=unit // 2,
        units=inputs // unit // splits,
        units_of_scale=group // unit,
        interpret=interpret,
    )
    whole = pl.BlockSpec(memory_space=pl.ANY)
    sums = pl.pallas_call(
        kernel,
        grid=(columns, splits, tiles),
        in_specs=[whole] * 3,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((splits, rows, outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="int4_matmul",
    )(x, packed, scale)
    return jnp.sum(sums, axis=0)


def _splits(units: int, programs: int) -> int:
    """Ways to split the inputs, for every multiprocessor to have several programs."""
    splits = 1
    while (
        splits < _MOST_SPLITS
        and units % (2 * splits) == 0
        and splits * programs < 4 * MULTIPROCESSORS
    ):
        splits *= 2
    return splits


def _kernel(
    x_ref: Ref,
    packed_ref: Ref,
    scale_ref: Ref,
    sum_ref: Ref,
    *,
    rows: int,
    tile: int,
    half: int,
    units: int,
    units_of_scale: int,
    interpret: bool,
) -> None:
    """A tile of rows by `_COLUMNS` outputs, over the units of one split."""
    split = pl.program_id(1)
    here = pl.program_id(2) * tile + jnp.arange(tile)
    there = here < rows
    first = pl.multiple_of(pl.program_id(0) * _COLUMNS, _COLUMNS)
    columns = pl.ds(first, _COLUMNS)
    inside = jnp.broadcast_to(there[:, None], (tile, half))

    def add_unit(i: jax.Array, total: jax.Array) -> jax.Array:
        unit = split * units + i
        values = plgpu.load(packed_ref.at[pl.ds(unit * half, half), columns])
        scale = plgpu.load(scale_ref.at[divide(unit, units_of_scale)[0], columns])
        products = jnp.zeros((tile, _COLUMNS), jnp.float32)
        for part, high in enumerate((False, True)):
            inputs = (2 * unit + part) * half + jnp.arange(half)
            x = plgpu.load(x_ref.at[here[:, None], inputs[None, :]], mask=inside, other=0.0)
            products += plgpu.dot(x, _unpacked(values, x.dtype, high=high, interpret=interpret))
        return total + products * scale.astype(jnp.float32)[None, :]

    total = lax.fori_loop(0, units, add_unit, jnp.zeros((tile, _COLUMNS), jnp.float32))
    mask = jnp.broadcast_to(there[:, None], (tile, _COLUMNS))
    places = sum_ref.at[split, here[:, None], first + jnp.arange(_COLUMNS)[None, :]]
    plgpu.store(places, total, mask=mask)


def _unpacked(values: jax.Array, dtype: jnp.dtype, *, high: bool, interpret: bool) -> jax.Array:
    """The low or high halves of bytes, less 8, in `dtype`."""
    if interpret:  # which has no assembly
        return ((values >> (4 * high) & 15).astype(jnp.int32) - _MIDDLE).astype(dtype)
    [halves] = plgpu.elementwise_inline_asm(
        _UNPACK.format(shift=_SHIFT if high else "", **_KINDS[dtype]),
        args=[values],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, dtype)],
    )
    return halves
