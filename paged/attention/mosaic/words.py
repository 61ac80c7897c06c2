"""Words of two 8-bit values taken apart on Hopper, into what its tensor cores multiply.

A register holds two words that lie side by side, four values. They become two registers of two
values each, in the type of `product_dtype`: exact, and in few instructions, for a span has twice as
many values as one of 16 bits takes from memory in the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from paged.attention.triton.unpack import product_dtype
from paged.kernels import Ref

WIDE = plgpu.Layout.WGMMA_8BIT
"""Of what `widened` gives: four neighbours of a row are in one thread."""

ROW = plgpu.Layout.WGMMA.reduce(1)
"""Of what has a number for each row of a matrix."""

# For each type the first two of a register's values, then its last two.
_E4M3 = """{{
    .reg .b16 low, high;
    mov.b32 {{low, high}}, $1;
    cvt.rn.f16x2.e4m3x2 $0, {half};
}}"""
# These are the upper half of a float16.
_E5M2 = "prmt.b32 $0, $1, 0, {bytes};"
# A bfloat16 from 128 up to 255 has an integer in its last 7 bits. The sign is 128 beyond these.
_INT8 = """{{
    .reg .b32 word, digits, sign;
    prmt.b32 word, $1, 0, {bytes};
    lop3.b32 digits, word, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, word, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 $0, digits, sign;
}}"""
_ASSEMBLY = {
    jnp.dtype(jnp.float8_e4m3fn): [_E4M3.format(half=half) for half in ("low", "high")],
    jnp.dtype(jnp.float8_e5m2): [_E5M2.format(bytes=b) for b in ("0x1404", "0x3424")],
    jnp.dtype(jnp.int8): [_INT8.format(bytes=b) for b in ("0x4140", "0x4342")],
}


def columns_of_tile(row: int, most: int = 64) -> int:
    """Elements of 16 bits that a tile in shared memory has of a row, as many as go into it."""
    return next(columns for columns in (64, 32, 16) if columns <= most and row % columns == 0)


def saturated(q: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Queries as `dtype`; beyond its range they saturate, as keys do."""
    if q.dtype == dtype:
        return q
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(q.astype(jnp.float32), -limit, limit).astype(dtype)


def in_halves(x: jax.Array) -> jax.Array:
    """The elements of the last axis in the order of `halves`, those of the first before."""
    pairs = x.reshape(*x.shape[:-1], -1, 2, 2)
    return jnp.swapaxes(pairs, -2, -3).reshape(x.shape)


def halves(words: jax.Array, dtype: jnp.dtype, *, interpreted: bool) -> tuple[jax.Array, ...]:
    """Of `words` [rows, W] the values 0, 1, 4, 5, .. of each row, and 2, 3, 6, 7, ..: [rows, W].

    Both the words and the values are in the layout of products.
    """
    wide = product_dtype(dtype)
    if interpreted:
        return tuple(jnp.split(in_halves(_values(words, dtype)), 2, axis=1))
    layout = plgpu.Layout.WGMMA
    shape = plgpu.ShapeDtypeStruct(words.shape, wide, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=(shape, shape))
    def split(_: Any, words: Any) -> tuple[Any, ...]:
        pairs = [functools.partial(_pair, assembly, wide) for assembly in _ASSEMBLY[dtype]]
        return tuple(_each_register(words, layout, pair) for pair in pairs)

    first, second = split(words)
    return first, second


def widened(words: jax.Array, dtype: jnp.dtype, *, interpreted: bool) -> jax.Array:
    """The values [rows, 2 * W] of `words` [rows, W], in the layout `WIDE`."""
    wide = product_dtype(dtype)
    if interpreted:
        return _values(words, dtype)
    rows, columns = words.shape
    shape = plgpu.ShapeDtypeStruct((rows, 2 * columns), wide, layout=WIDE)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=shape)
    def widen(_: Any, words: Any) -> Any:
        def four(register: Any) -> Any:
            pairs = [_pair(assembly, wide, register) for assembly in _ASSEMBLY[dtype]]
            return utils.vector_concat(pairs)

        return _each_register(words, WIDE, four)

    return widen(words)


def gathered(ref: Ref, index: jax.Array, *, interpreted: bool) -> jax.Array:
    """The elements of `ref` [E], in the device's memory, at `index` [rows], a number for each row
    of a matrix."""
    if interpreted:
        return ref[...][index]
    shape = plgpu.ShapeDtypeStruct(index.shape, ref.dtype, layout=ROW)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW), return_type=shape)
    def gather(_: Any, ref: Any, index: Any) -> Any:
        kind = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)

        def load(register: Any) -> Any:
            place = arith.index_cast(ir.IndexType.get(), vector.extract(register, [], [0]))
            return vector.broadcast(kind, memref.load(ref, [place]))

        signed = utils.is_signed(shape.dtype)
        return _each_register(index, ROW, load, signed=signed)

    return gather(ref, index)


def _values(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What the kernels compute, in plain JAX for the interpreter."""
    values = lax.bitcast_convert_type(words, dtype)
    return values.reshape(len(words), -1).astype(product_dtype(dtype))


def _each_register(
    of: Any, layout: Any, work: Callable[[Any], Any], signed: bool | None = None
) -> Any:
    """An array of the registers that become of those of another."""
    made = np.empty_like(of.registers)
    for place, register in np.ndenumerate(of.registers):
        made[place] = work(register)
    return mgpu.FragmentedArray(_registers=made, _layout=layout.to_mgpu(), _is_signed=signed)


def _pair(assembly: str, dtype: jnp.dtype, register: Any) -> Any:
    """Run assembly on a register; gives two values of 16 bits."""
    i32 = ir.IntegerType.get_signless(32)
    made = llvm.inline_asm(i32, [utils.bitcast(register, i32)], assembly, "=r,r")
    kind = utils.dtype_to_ir_type(dtype)
    return utils.bitcast(made, ir.VectorType.get((2,), kind))
