"""Weights of 4 or 8 bits in the order in which the threads of a warpgroup multiply them.

A brick is 64 outputs by 64 inputs, whose values lie as words of 32 bits. A thread takes the words
that hold its own part of the matrix, makes floats of 16 bits of them without converting integers,
and hands these to a tensor core: nothing moves between threads, and nothing goes back to memory.

bfloat16 with the bits 0x4300 + n is the number 128 + n, and float16 with 0x6400 + n is 1024 + n; so
one instruction makes two weights of 4 bits, and one takes off what they have too much. A float of 8
bits (e4m3) becomes one of 16 with the same digits, smaller by a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

BRICK = 64
"""Outputs, and inputs, of a brick."""

_THREADS, _WORDS_AT_ONCE = 128, 4
_MIDDLE = 8
# Outputs of a brick as (warp, half, lane); its inputs as (step, half, lane, one of two).
_OUTPUTS, _INPUTS = (4, 2, 8), (4, 2, 4, 2)

_INT4 = """{{
.reg .b32 a, b, c;
shr.b32 a, $4, 4;
shr.b32 b, $4, 8;
shr.b32 c, $4, 12;
lop3.b32 $0, $4, 0x000F000F, 0x{base}00{base}00, 0xEA;
lop3.b32 $1, a, 0x000F000F, 0x{base}00{base}00, 0xEA;
lop3.b32 $2, b, 0x000F000F, 0x{base}00{base}00, 0xEA;
lop3.b32 $3, c, 0x000F000F, 0x{base}00{base}00, 0xEA;
mov.b32 a, 0x{base}08{base}08;
sub.rn.{kind}x2 $0, $0, a;
sub.rn.{kind}x2 $1, $1, a;
sub.rn.{kind}x2 $2, $2, a;
sub.rn.{kind}x2 $3, $3, a;
}}"""
_FP8 = """{{
.reg .b32 a, b, c;
shl.b32 a, $2, 8;
shl.b32 b, $2, {left};
shr.b32 c, $2, {right};
and.b32 b, b, 0x{digits}{digits};
and.b32 c, c, 0x{digits}{digits};
lop3.b32 $0, a, 0x80008000, b, 0xEA;
lop3.b32 $1, $2, 0x80008000, c, 0xEA;
mov.b32 a, 0x{power}{power};
mul.rn.{kind}x2 $0, $0, a;
mul.rn.{kind}x2 $1, $1, a;
}}"""
_OF_INT4 = {
    jnp.dtype(jnp.bfloat16): {"kind": "bf16", "base": "43"},
    jnp.dtype(jnp.float16): {"kind": "f16", "base": "64"},
}
_OF_FP8 = {
    jnp.dtype(jnp.bfloat16): {
        "kind": "bf16",
        "left": 4,
        "right": 4,
        "digits": "07F0",
        "power": "7B80",
    },
    jnp.dtype(jnp.float16): {
        "kind": "f16",
        "left": 7,
        "right": 1,
        "digits": "3F80",
        "power": "5C00",
    },
}


@dataclass(frozen=True)
class Kind:
    """How values lie in the words of a brick.

    Attributes:
        bits: of a value.
    """

    bits: int

    @property
    def values(self) -> int:
        """Values of a word."""
        return 32 // self.bits

    @property
    def shape(self) -> tuple[int, int]:
        """Of a brick's words: those of a thread lie four by four."""
        return BRICK * BRICK // self.values // _THREADS, _THREADS

    def words(self, values: jax.Array) -> jax.Array:
        """Values [N, K] to bricks [N / 64, K / 64, *shape] uint32.

        Of 4 bits values are uint8, 8 of which stands for 0; of 8 bits they are float8_e4m3fn.
        """
        if self.bits == 8:
            values = jax.lax.bitcast_convert_type(values, jnp.uint8)
        outputs, inputs = values.shape
        parts = values.reshape(outputs // BRICK, *_OUTPUTS, inputs // BRICK, *_INPUTS)
        parts = parts.transpose(0, 4, *self._to_words)
        shifts = self._shifts.reshape(parts.shape[-self._packed :])
        words = parts.astype(jnp.uint32) << shifts
        words = jnp.sum(words, axis=tuple(range(-self._packed, 0)), dtype=jnp.uint32)
        # Threads in the middle: each reads four words at once.
        words = words.reshape(*words.shape[:2], _THREADS, -1, _WORDS_AT_ONCE)
        return words.swapaxes(2, 3).reshape(*words.shape[:2], *self.shape)

    def values_of(self, words: jax.Array) -> jax.Array:
        """The reverse of `words`."""
        rows, columns = words.shape[:2]
        by_thread = words.reshape(rows, columns, -1, _THREADS, _WORDS_AT_ONCE).swapaxes(2, 3)
        order = self._to_words
        sizes = dict(enumerate((0, *_OUTPUTS, 0, *_INPUTS)))
        packed = tuple(sizes[axis] for axis in order[-self._packed :])
        shifts = self._shifts.reshape(packed)
        kept = by_thread.reshape(
            rows, columns, *(sizes[axis] for axis in order[: -self._packed]), *(1,) * self._packed
        )
        parts = kept >> shifts & (2**self.bits - 1)
        values = parts.astype(jnp.uint8).transpose(np.argsort((0, 4, *order)))
        values = values.reshape(rows * BRICK, columns * BRICK)
        if self.bits == 8:
            return jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
        return values

    def unpacked(self, words: jax.Array, dtype: Any) -> jax.Array:
        """In a kernel: words [n, *shape] of a row of bricks to [64, 64 * n], less 8 if integers."""
        inputs = BRICK * words.shape[0]

        @plgpu.inline_mgpu(
            arg_types=(self.layout(words.shape[0]),),
            return_type=plgpu.ShapeDtypeStruct((BRICK, inputs), dtype, plgpu.Layout.WGMMA),
        )
        def unpack(_: Any, words: Any) -> Any:
            return self._registers(words, inputs, jnp.dtype(dtype))

        return unpack(words)

    def unpacked_slowly(self, words: jax.Array, dtype: Any) -> jax.Array:
        """`unpacked`, where a kernel is interpreted."""
        values = self.values_of(words[None])
        if self.bits == 8:
            return values.astype(dtype)
        return (values.astype(jnp.int32) - _MIDDLE).astype(dtype)

    def layout(self, bricks: int) -> Any:
        """Of the words of some bricks in registers."""
        return plgpu.Layout.WG_STRIDED((bricks, *self.shape), vec_size=_WORDS_AT_ONCE)

    @property
    def _packed(self) -> int:
        """Axes of `_to_words` that lie within a word."""
        return 3 if self.bits == 4 else 2

    @property
    def _to_words(self) -> tuple[int, ...]:
        """Order of the axes of `_OUTPUTS` (1 to 3) and `_INPUTS` (5 to 8), those of a word last.

        Threads first, then the words of each.
        """
        return (1, 3, 7, 5, 8, 6, 2) if self.bits == 4 else (1, 3, 7, 5, 6, 8, 2)

    @property
    def _shifts(self) -> jax.Array:
        """Where the values of a word begin: a register gets the two that lie 16 bits apart."""
        return jnp.arange(self.values, dtype=jnp.uint32) * jnp.uint32(self.bits)

    def _registers(self, words: Any, inputs: int, dtype: jnp.dtype) -> Any:
        """The matrix in registers, out of a `FragmentedArray` of words."""
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), mosaic.utils.dtype_to_ir_type(dtype))
        layout = mosaic.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((BRICK, inputs)), dtype=object)
        text = (_INT4 if self.bits == 4 else _FP8).format(
            **(_OF_INT4 if self.bits == 4 else _OF_FP8)[dtype]
        )
        count = self.values // 2
        results = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
        constraints = ",".join(["=&r"] * count + ["r"])
        each = []
        for vector_of_words in words.registers.flat:
            for i in range(_WORDS_AT_ONCE):
                word = vector.extract(vector_of_words, [], [i])
                out = llvm.inline_asm(results, [word], text, constraints)
                each += [llvm.extractvalue(i32, out, [j]) for j in range(count)]
        for place, register in zip(np.ndindex(registers.shape), each, strict=True):
            one = vector.broadcast(ir.VectorType.get((1,), i32), register)
            registers[place] = vector.bitcast(pair, one)
        return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


INT4, FP8 = Kind(4), Kind(8)
