"""Rows in groups times their own weights of 4 bits (MXFP4), which are unpacked on the way.

What a weight of 4 bits stands for has a sign, two bits of exponent and one of mantissa. Put where a
float of 16 bits has its own, these bits are that number times a power of two, its subnormal one
included: two shifts and a product make two weights of a word, and nothing is looked up. As in
`paged.matmul.int4`, the low halves of bytes are for the first inputs of a unit, the high ones for
the others.

Axis letters, besides those of `paged.matmul`: X groups, H bytes of a unit.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.kernels import MULTIPROCESSORS, Ref
from paged.matmul.groups import Groups, work_list
from paged.matmul.tiling import ROW_UNIT

CODE_UNIT = 32
"""Inputs that share a scale."""

MOST_CODE_ROWS = 64
"""Rows a group, on the average, up to which the kernel is faster than to expand the weights."""

_HALF = CODE_UNIT // 2
_COLUMNS = (128, 64)
_MOST_SPLITS = 4
_MANTISSA = 23  # bits of a float32's

# Of four bytes: the numbers of their low halves, or once shifted of their high ones.
_UNPACK = """{{
.reg .b32 a, b, m, n, s;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
{shift}
shl.b32 m, a, {place};
shl.b32 n, b, {place};
and.b32 m, m, 0x{mask}{mask};
and.b32 n, n, 0x{mask}{mask};
shl.b32 a, a, 12;
shl.b32 b, b, 12;
lop3.b32 a, a, 0x80008000, m, 0xEA;
lop3.b32 b, b, 0x80008000, n, 0xEA;
mov.b32 s, 0x{factor}{factor};
mul.rn.{kind}x2 $0, a, s;
mul.rn.{kind}x2 $1, b, s;
}}"""
_SHIFT = "shr.b32 a, a, 4;\nshr.b32 b, b, 4;"


class _Kind(NamedTuple):
    """How numbers are made in a dtype, and how much too small that leaves them."""

    assembly: dict[str, str | int]
    missing: float


_KINDS = {
    # 2 ** 120 of the 2 ** 126 that are missing, all that this dtype's numbers reach.
    jnp.dtype(jnp.bfloat16): _Kind(
        {"kind": "bf16", "place": 6, "mask": "01C0", "factor": "7B80"}, 2.0**6
    ),
    jnp.dtype(jnp.float16): _Kind(
        {"kind": "f16", "place": 9, "mask": "0E00", "factor": "7400"}, 1.0
    ),
}


def supports_codes(x: jax.Array, packed: jax.Array, scale: jax.Array) -> bool:
    """Whether the kernel takes x [M, K], packed [X, K / 2, N] and scale [X, K / 32, N]."""
    num_groups, half_inputs, outputs = packed.shape
    return (
        jnp.dtype(x.dtype) in _KINDS
        and scale.dtype == jnp.uint8
        and scale.shape == (num_groups, 2 * half_inputs // CODE_UNIT, outputs)
        and outputs % _COLUMNS[-1] == 0
        and x.shape[0] % ROW_UNIT == 0
        and x.shape[0] <= MOST_CODE_ROWS * num_groups
    )


def grouped_codes_matmul(
    x: jax.Array, packed: jax.Array, scale: jax.Array, groups: Groups, *, interpret: bool = False
) -> jax.Array:
    """x [M, K], whose rows come in groups, times each group's own weight; [M, N] float32.

    What nobody's rows become is not specified.

    Args:
        x: a float of 16 bits.
        packed: [X, K / 2, N] uint8.
        scale: [X, K / 32, N] uint8, exponents of 2 with 127 added.
        groups: of the rows.
        interpret: run on a CPU, in Pallas' interpreter.

    Raises:
        ValueError: for arrays that `supports_codes` rejects.
    """
    if not supports_codes(x, packed, scale):
        raise ValueError(
            f"the kernel takes up to {MOST_CODE_ROWS} rows of 16-bit floats a group, groups of "
            f"{CODE_UNIT} inputs and outputs in multiples of {_COLUMNS[-1]}, got {x.dtype} "
            f"{x.shape}, {packed.shape} and {scale.shape}: expand these weights"
        )
    (rows, inputs), (num_groups, _, outputs) = x.shape, packed.shape
    columns = next(each for each in _COLUMNS if outputs % each == 0)
    tile = min(max(16, pl.next_power_of_2(pl.cdiv(rows, num_groups))), 64)
    work = work_list(groups, rows, tile)
    tiles = (groups.sizes + tile - 1) // tile
    starts = groups.ends - groups.sizes - (work.ends - tiles) * tile
    units, programs = inputs // CODE_UNIT, len(work.groups) * (outputs // columns)
    splits = _splits(units, programs)
    kernel = partial(
        _kernel, tile=tile, columns=columns, units=units // splits, interpret=interpret
    )
    whole = pl.BlockSpec(memory_space=pl.ANY)
    sums = pl.pallas_call(
        kernel,
        grid=(outputs // columns, splits, len(work.groups)),
        in_specs=[whole] * 6,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((splits, rows, outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="grouped_codes_matmul",
    )(x, packed, scale, work.groups, starts, groups.ends)
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
    tile_groups_ref: Ref,
    starts_ref: Ref,
    ends_ref: Ref,
    sum_ref: Ref,
    *,
    tile: int,
    columns: int,
    units: int,
    interpret: bool,
) -> None:
    """A tile of a group's rows by some outputs, over the units of one split.

    Tiles that no group has begin at or behind the end of theirs, and have no rows.
    """
    split, index = pl.program_id(1), pl.program_id(2)
    group = plgpu.load(tile_groups_ref.at[index])
    first, end = plgpu.load(starts_ref.at[group]) + index * tile, plgpu.load(ends_ref.at[group])
    here = first + jnp.arange(tile)
    there = here < end
    column = pl.program_id(0) * columns + jnp.arange(columns)
    inside = jnp.broadcast_to(there[:, None], (tile, _HALF))
    dtype = jnp.dtype(x_ref.dtype)

    def add_unit(i: jax.Array, total: jax.Array) -> jax.Array:
        unit = split * units + i
        half = unit * _HALF + jnp.arange(_HALF)
        values = plgpu.load(packed_ref.at[group, half[:, None], column[None, :]])
        exponents = plgpu.load(scale_ref.at[group, unit, column]).astype(jnp.int32)
        scale = lax.bitcast_convert_type(exponents << _MANTISSA, jnp.float32)
        products = jnp.zeros((tile, columns), jnp.float32)
        for part, high in enumerate((False, True)):
            inputs = (2 * unit + part) * _HALF + jnp.arange(_HALF)
            x = plgpu.load(x_ref.at[here[:, None], inputs[None, :]], mask=inside, other=0.0)
            products += plgpu.dot(x, _numbers(values, dtype, high=high, interpret=interpret))
        return total + products * (scale * _KINDS[dtype].missing)[None, :]

    @pl.when(first < end)
    def add_up() -> None:
        total = lax.fori_loop(0, units, add_unit, jnp.zeros((tile, columns), jnp.float32))
        mask = jnp.broadcast_to(there[:, None], (tile, columns))
        plgpu.store(sum_ref.at[split, here[:, None], column[None, :]], total, mask=mask)


def _numbers(values: jax.Array, dtype: jnp.dtype, *, high: bool, interpret: bool) -> jax.Array:
    """What the low or high halves of bytes stand for, too small by what is missing in `dtype`."""
    kind = _KINDS[dtype]
    if interpret:  # which has no assembly
        bits = (values >> (4 * high)).astype(jnp.int32) & 15
        exponent, mantissa = (bits >> 1) & 3, bits & 1
        twice = jnp.where(exponent > 0, (2 + mantissa) << jnp.maximum(exponent - 1, 0), mantissa)
        signed = jnp.where(bits >= 8, -twice, twice).astype(jnp.float32)
        return (signed / (2 * kind.missing)).astype(dtype)
    [numbers] = plgpu.elementwise_inline_asm(
        _UNPACK.format(shift=_SHIFT if high else "", **kind.assembly),
        args=[values],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, dtype)],
    )
    return numbers
