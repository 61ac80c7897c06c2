"""Weights alone quantised, to integers of 4 or 8 bits, with scales and shifts for groups of inputs.

A weight is value * scale + shift. So GGUF files store theirs: what they dequantise to is kept to
the last bit, unlike by `GroupScaled`, whose zeros are integers. Scales and shifts may be integers
themselves, in units that larger groups share.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from paged.models.quantized.bricks import made
from paged.models.quantized.groups import GroupScaled, unpack
from paged.models.weights import Portable, Unfused

_F32 = jnp.dtype(jnp.float32)


@struct.dataclass
class GroupShifted(Unfused, Portable):
    """A weight with a scale, and perhaps a shift, for each group of inputs of each output.

    Elsewhere than in a kernel for it, it is expanded to multiply.

    Attributes:
        weight: [K * bits / 8, *N] uint8, see `paged.models.quantized.groups.pack`.
        scale: [K / group, *N], floats or int8 in units.
        shift: likewise; None for what makes the middle value stand for 0.
        scale_unit: [K / larger group, *N], of the scales; None for 1.
        shift_unit: likewise, of the shifts.
        bias: [*N] or None.
        bits: 4 or 8 (static).
    """

    in_few_bits = True

    weight: jax.Array
    scale: jax.Array
    shift: jax.Array | None = None
    scale_unit: jax.Array | None = None
    shift_unit: jax.Array | None = None
    bias: jax.Array | None = None
    bits: int = struct.field(pytree_node=False, kw_only=True)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.weight.shape[0] * 8 // self.bits // self.scale.shape[0]

    @property
    def float_dtype(self) -> jnp.dtype:
        """Of what are no integers."""
        return (self.scale if self.scale_unit is None else self.scale_unit).dtype

    def expanded(self, dtype: jnp.dtype) -> jax.Array:
        """The weight [K, *N] in `dtype`, worked out in float32."""
        values = unpack(self.weight, self.bits, self.group).astype(_F32)
        groups = values.reshape(-1, self.group, *values.shape[1:])
        scales, shifts = self.scales(), self.shifts()
        if shifts is None:
            out = (groups - 2 ** (self.bits - 1)) * scales[:, None]
        else:
            out = groups * scales[:, None] + shifts[:, None]
        return out.reshape(values.shape).astype(dtype)

    def scales(self) -> jax.Array:
        """[K / group, *N] float32."""
        return _in_units(self.scale, self.scale_unit)

    def shifts(self) -> jax.Array | None:
        """[K / group, *N] float32; see `shift`."""
        return None if self.shift is None else _in_units(self.shift, self.shift_unit)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        out = jnp.tensordot(x, self.expanded(x.dtype), axes=1, preferred_element_type=dtype)
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def on_hopper(self, device_kind: str) -> Portable:
        """See `Portable`."""
        if self.bits != 4:
            return self
        scaled, beyond = made(_parted, self)
        product = scaled.on_hopper(device_kind)
        return HopperGroupShifted(product, beyond, self.bias, self.group)


@struct.dataclass
class HopperGroupShifted(Unfused, Portable):
    """A `GroupShifted` of 4 bits as a Hopper GPU multiplies it.

    A kernel's weights have no shifts: what these add is a product with sums of groups of inputs.

    Attributes:
        product: by the values less 8, times their scales, as a `GroupScaled` multiplies there.
        beyond: [K / group, *N] float32, by how much the weights are more; None for nothing.
        bias: [*N] or None.
        group: inputs that share a scale (static).
    """

    in_few_bits = True

    product: Any
    beyond: jax.Array | None
    bias: jax.Array | None
    group: int = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        out = self.product(x, _F32)
        if self.beyond is not None:
            sums = jnp.sum(x.astype(_F32).reshape(len(x), -1, self.group), axis=-1)
            out += jnp.tensordot(sums, self.beyond, axes=1)
        if self.bias is not None:
            out += self.bias.astype(_F32)
        return out.astype(dtype or x.dtype)

    def on_hopper(self, device_kind: str) -> HopperGroupShifted:
        """See `Portable`."""
        return self


@jax.jit
def _parted(weight: GroupShifted) -> tuple[GroupScaled, jax.Array | None]:
    """The same weight without its shifts, and what it then lacks in each group."""
    scale, shift = weight.scales(), weight.shifts()
    beyond = None if shift is None else shift + 2 ** (weight.bits - 1) * scale
    return GroupScaled(weight.weight, scale.astype(jnp.float16), bits=weight.bits), beyond


@struct.dataclass
class ShiftedEmbedding(Portable):
    """A quantised `paged.models.weights.Embedding`.

    Attributes:
        rows: D to V; its floats are in the dtype of what is looked up.
    """

    in_few_bits = True

    rows: GroupShifted

    @property
    def dtype(self) -> jnp.dtype:
        """Of the vectors."""
        return self.rows.float_dtype

    def lookup(self, tokens: jax.Array) -> jax.Array:
        """See `Embedding.lookup`."""
        taken = jax.tree.map(lambda each: jnp.take(each, tokens, axis=-1, mode="clip"), self.rows)
        return taken.expanded(self.dtype).T

    def unembed(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """See `Embedding.unembed`."""
        return self.rows(x, dtype)

    def on_hopper(self, device_kind: str) -> ShiftedEmbedding:
        """See `Portable`: single tokens cannot be taken out of what a kernel multiplies."""
        return self


def _in_units(numbers: jax.Array, units: jax.Array | None) -> jax.Array:
    """Numbers [G, *N] times what some neighbours share, float32."""
    wide = numbers.astype(_F32)
    if units is None:
        return wide
    shared = wide.reshape(len(units), -1, *wide.shape[1:]) * units.astype(_F32)[:, None]
    return shared.reshape(wide.shape)
