"""Weights of 4 bits that stand for 16 numbers of any kind, with scales for groups of inputs.

MXFP4 has the floats of 4 bits (E2M1) and scales that are powers of two; NF4 the quantiles of a
normal distribution.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from paged.models.quantized.groups import unpack
from paged.models.weights import Portable, Unfused

_F32 = jnp.dtype(jnp.float32)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))
"""A sign, two bits of exponent, one of mantissa."""
_MANTISSA = 23  # bits of a float32's


@struct.dataclass
class GroupCoded(Unfused, Portable):
    """A weight that is codes[value] * scale; it is expanded to multiply.

    Attributes:
        weight: [K / 2, *N] uint8, see `paged.models.quantized.groups.pack`.
        scale: [K / group, *N] floats; or uint8, exponents of 2 with 127 added.
        bias: [*N] or None.
        codes: what the 16 values stand for (static).
    """

    in_few_bits = True

    weight: jax.Array
    scale: jax.Array
    bias: jax.Array | None = None
    codes: tuple[float, ...] = struct.field(pytree_node=False, kw_only=True)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.weight.shape[0] * 2 // self.scale.shape[0]

    def expanded(self, dtype: jnp.dtype) -> jax.Array:
        """The weight [K, *N] in `dtype`, worked out in float32."""
        values = unpack(self.weight, 4, self.group)
        numbers = jnp.asarray(self.codes, _F32)[values]
        groups = numbers.reshape(-1, self.group, *values.shape[1:])
        return (groups * self.scales()[:, None]).reshape(values.shape).astype(dtype)

    def scales(self) -> jax.Array:
        """[K / group, *N] float32; what is below its least normal number is 0."""
        if self.scale.dtype != jnp.uint8:
            return self.scale.astype(_F32)
        return jax.lax.bitcast_convert_type(self.scale.astype(jnp.int32) << _MANTISSA, _F32)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        out = jnp.tensordot(x, self.expanded(x.dtype), axes=1, preferred_element_type=dtype)
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def on_hopper(self, device_kind: str) -> GroupCoded:
        """See `Portable`."""
        return self
