"""Weights alone quantised, to integers of 4 or 8 bits, with scales for groups of their inputs.

A weight is (value - zero) * scale. Of 4 bits, a byte holds two values of an output: of the first
and of the second half of a unit of inputs, a unit being what of a group fits in 128. So its low
halves are one run of inputs and its high halves are the next.
"""

from __future__ import annotations

from math import gcd, prod

import jax
import jax.numpy as jnp
from flax import struct

from paged import matmul
from paged.models.quantized.bricks import InBricks, fits_bricks, made
from paged.models.weights import Portable, Unfused

_UNIT, _MIDDLE4 = 128, 8


def unit_of(group: int) -> int:
    """Inputs whose values share bytes, where so many share a scale."""
    return gcd(group, _UNIT)


def pack(values: jax.Array, bits: int, group: int) -> jax.Array:
    """Values [K, *N] uint8 of so many bits to [K * bits / 8, *N], packed by units of a group."""
    if bits == 8:
        return values
    halves = values.reshape(-1, 2, unit_of(group) // 2, *values.shape[1:])
    packed = halves[:, 0] | (halves[:, 1] << 4)
    return packed.reshape(-1, *values.shape[1:])


def unpack(packed: jax.Array, bits: int, group: int) -> jax.Array:
    """The reverse of `pack`."""
    if bits == 8:
        return packed
    units = packed.reshape(-1, unit_of(group) // 2, *packed.shape[1:])
    halves = jnp.stack([units & 15, units >> 4], axis=1)
    return halves.reshape(-1, *packed.shape[1:])


@struct.dataclass
class GroupScaled(Unfused, Portable):
    """A weight with a scale for each group of inputs of each output.

    Elsewhere than in a kernel for it, it is expanded to multiply.

    Attributes:
        weight: [K * bits / 8, *N] uint8, see `pack`.
        scale: [K / group, *N].
        zero: [K / group, *N] uint8, the value that stands for 0; None for the middle one.
        order: [K] int32, which input each row is for; None for the order they come in.
        bias: [*N] or None.
        bits: 4 or 8 (static).
    """

    in_few_bits = True

    weight: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None
    order: jax.Array | None = None
    bias: jax.Array | None = None
    bits: int = struct.field(pytree_node=False, kw_only=True)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.weight.shape[0] * 8 // self.bits // self.scale.shape[0]

    def expanded(self, dtype: jnp.dtype) -> jax.Array:
        """The weight [K, *N] in `dtype`, its rows in their stored `order`."""
        values = unpack(self.weight, self.bits, self.group).astype(dtype)
        middle = jnp.asarray(2 ** (self.bits - 1), dtype)
        zero = middle if self.zero is None else self.zero.astype(dtype)[:, None]
        groups = values.reshape(-1, self.group, *values.shape[1:])
        return ((groups - zero) * self.scale.astype(dtype)[:, None]).reshape(values.shape)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        if self.order is not None:
            x = jnp.take(x, self.order, axis=-1)
        out = jnp.tensordot(x, self.expanded(x.dtype), axes=1, preferred_element_type=dtype)
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def on_hopper(self, device_kind: str) -> Portable:
        """See `Portable`."""
        inputs, outputs = self.weight.shape[0] * 8 // self.bits, prod(self.scale.shape[1:])
        sizes = inputs, outputs, self.group
        if self.bits != 4 or not fits_bricks(self.weight, *sizes, self.scale.dtype):
            return self
        return made(_in_bricks, self)


@jax.jit
def _in_bricks(weight: GroupScaled) -> InBricks:
    """The same weight of 4 bits."""
    outputs = weight.scale.shape[1:]
    scale, zero = weight.scale.reshape(-1, prod(outputs)), None
    values = unpack(weight.weight, weight.bits, weight.group).reshape(-1, prod(outputs))
    if weight.zero is not None:
        zero = (weight.zero.reshape(scale.shape).astype(jnp.int32) - _MIDDLE4).astype(scale.dtype)
    words = matmul.INT4.words(values.T)
    return InBricks(words, scale, zero, weight.order, weight.bias, tuple(outputs))
