"""Taking words of two 8-bit values apart, in few instructions.

A word is 16 bits, and a register holds the words of two positions. What comes out is the first or
the second value of both, again in one register, as products want them: floats of 8 bits as
float16, integers as bfloat16, both exact. A span has twice as many values as one of 16 bits, and
the conversions that the compiler would choose take longer than it takes to read them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

# Bytes 0 and 2 of a register, or 1 and 3, side by side; then both widened.
_E4M3 = """{{
    .reg .b32 bytes; .reg .b16 low, high;
    prmt.b32 bytes, $1, 0, {bytes};
    mov.b32 {{low, high}}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, low;
}}"""
# These are the upper half of a float16.
_E5M2 = "prmt.b32 $0, $1, 0, {bytes};"
# A bfloat16 from 128 up to 255 has an integer in its last 7 bits, and the sign's weight is 128.
_INT8 = """{{
    .reg .b32 word, digits, sign, minus;
    shr.b32 word, $1, {shift};
    lop3.b32 digits, word, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, word, 0x00800080, 0x43004300, 0xea;
    mov.b32 minus, 0xbf80bf80;
    fma.rn.bf16x2 $0, sign, minus, digits;
}}"""
_ASSEMBLY = {
    jnp.dtype(jnp.float8_e4m3fn): [_E4M3.format(bytes=b) for b in ("0x4420", "0x4431")],
    jnp.dtype(jnp.float8_e5m2): [_E5M2.format(bytes=b) for b in ("0x2404", "0x3414")],
    jnp.dtype(jnp.int8): [_INT8.format(shift=shift) for shift in (0, 8)],
}


def product_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """What values of this 8-bit type are multiplied as."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.int8 else jnp.float16)


def unpack(words: jax.Array, dtype: jnp.dtype, *, interpret: bool) -> tuple[jax.Array, ...]:
    """The first values of all words, and the second ones, in `product_dtype`."""
    wide = product_dtype(dtype)
    if interpret:
        values = lax.bitcast_convert_type(words, dtype).astype(wide)
        return values[..., 0], values[..., 1]

    def run(assembly: str) -> jax.Array:
        [values] = plgpu.elementwise_inline_asm(
            assembly,
            args=[words],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, wide)],
        )
        return values

    first, second = _ASSEMBLY[dtype]
    return run(first), run(second)
