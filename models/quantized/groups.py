"""Weights alone quantised, to integers of 4 or 8 bits, with scales for groups of their inputs.

A weight is (value - zero) * scale. Of 4 bits, a byte holds two values of an output: of the first
and of the second half of a unit of inputs, a unit being what of a group fits in 128. So a kernel
takes its low halves for one run of inputs and its high halves for the next, and shuffles nothing.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from flax import struct

from paged import matmul
from paged.models.activations import gate
from paged.models.weights import Portable

_MIDDLE4 = 8


def pack(values: jax.Array, bits: int, group: int) -> jax.Array:
    """Values [K, *N] uint8 of so many bits to [K * bits / 8, *N], packed by units of a group."""
    if bits == 8:
        return values
    halves = values.reshape(-1, 2, matmul.int4_unit(group) // 2, *values.shape[1:])
    packed = halves[:, 0] | (halves[:, 1] << 4)
    return packed.reshape(-1, *values.shape[1:])


def unpack(packed: jax.Array, bits: int, group: int) -> jax.Array:
    """The reverse of `pack`."""
    if bits == 8:
        return packed
    units = packed.reshape(-1, matmul.int4_unit(group) // 2, *packed.shape[1:])
    halves = jnp.stack([units & 15, units >> 4], axis=1)
    return halves.reshape(-1, *packed.shape[1:])


@struct.dataclass
class GroupScaled(Portable):
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

    def added_to(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        return residual + self(x)

    def gated(self, x: jax.Array, activation: str) -> jax.Array:
        return gate(self(x), activation)

    def on_hopper(self, device_kind: str) -> GroupScaled:
        """See `Portable`."""
        return HopperGroupScaled(
            self.weight, self.scale, self.zero, self.order, self.bias, bits=self.bits
        )


@struct.dataclass
class HopperGroupScaled(GroupScaled):
    """As `GroupScaled`, on a Hopper GPU: of 4 bits, a few rows are multiplied by a kernel of ours.

    For many rows it pays to expand the weight once.
    """

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        inputs, outputs = x.shape[1], self.scale.shape[1:]
        if self.bits != 4:
            return GroupScaled.__call__(self, x, dtype)
        packed, scale = self.weight.reshape(inputs // 2, -1), self.scale.reshape(-1, prod(outputs))
        if not matmul.supports_int4(x, packed, scale):
            return GroupScaled.__call__(self, x, dtype)
        if self.order is not None:
            x = jnp.take(x, self.order, axis=-1)
        out = matmul.int4_matmul(x, packed, scale)
        if self.zero is not None:
            out -= self._of_zeros(x, scale)
        if self.bias is not None:
            out += self.bias.reshape(-1).astype(jnp.float32)
        return out.astype(dtype or x.dtype).reshape(len(x), *outputs)

    def _of_zeros(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """What the kernel, for which all zeros are the middle value, has too much; [T, N]."""
        assert self.zero is not None
        sums = jnp.sum(x.astype(jnp.float32).reshape(len(x), len(scale), -1), axis=-1)
        beyond = self.zero.reshape(scale.shape).astype(jnp.float32) - _MIDDLE4
        return jnp.dot(sums, beyond * scale.astype(jnp.float32), precision="highest")
