"""Weights of 8 bits, floats (e4m3) or integers, stored outputs first as matrix units read them.

The products of `ChannelScaled` are of 8 bits on both sides: activations are quantised as they
come, each token by the largest of its own elements. Where a checkpoint brings one scale for all
activations, it is not used: that of the token at hand is never worse.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from paged.models.activations import gate
from paged.models.weights import Portable

FLOAT8, INT8 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8)
# The largest magnitude that each is scaled to.
LARGEST = {FLOAT8: 448.0, INT8: 127.0}
# Inputs that share a scale where there is more than one for an output.
TILE = 128
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def scaled(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """x [..., K] in `dtype`, each row scaled to fill its range, and the scales [...] float32."""
    largest = LARGEST[dtype]
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / largest
    scale = jnp.where(scale > 0, scale, 1)
    values = wide / scale[..., None]
    return (jnp.round(values) if dtype == INT8 else values).astype(dtype), scale


@struct.dataclass
class ChannelScaled(Portable):
    """A weight with a scale for each output.

    Attributes:
        weight: [*N, K] float8_e4m3fn or int8.
        scale: [*N] float32.
        bias: [*N] or None.
    """

    in_few_bits = True

    weight: jax.Array
    scale: jax.Array
    bias: jax.Array | None = None

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        dtype = dtype or x.dtype
        values, scale = scaled(x, self.weight.dtype)
        rows = self.weight.reshape(-1, self.weight.shape[-1])
        product = jax.lax.dot_general(
            values, rows, _CONTRACT_LAST, preferred_element_type=self._sum_dtype(dtype)
        )
        out = product.astype(jnp.float32) * scale[:, None] * self.scale.reshape(-1)
        if self.bias is not None:
            out += self.bias.reshape(-1).astype(jnp.float32)
        return out.astype(dtype).reshape(len(x), *self.scale.shape)

    def added_to(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        return residual + self(x)

    def gated(self, x: jax.Array, activation: str) -> jax.Array:
        return gate(self(x), activation)

    def on_hopper(self, device_kind: str) -> ChannelScaled:
        """See `Portable`: XLA leaves it to cuBLASLt, and nothing is faster."""
        return self

    def _sum_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """What a product comes in: as narrow as the output where sums before scaling fit."""
        if self.weight.dtype == INT8:
            return jnp.dtype(jnp.int32)
        return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


@struct.dataclass
class TileScaled(Portable):
    """A weight with a scale for each `TILE` inputs of each output.

    It is expanded to multiply, in memory on a GPU; activations are not quantised.

    Attributes:
        weight: [*N, K] float8_e4m3fn.
        scale: [*N, ceil(K / TILE)] float32.
        bias: [*N] or None.
    """

    in_few_bits = True

    weight: jax.Array
    scale: jax.Array
    bias: jax.Array | None = None

    def expanded(self, dtype: jnp.dtype) -> jax.Array:
        """The weight [*N, K] in `dtype`."""
        scale = jnp.repeat(self.scale, TILE, axis=-1)[..., : self.weight.shape[-1]]
        return (self.weight.astype(jnp.float32) * scale).astype(dtype)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        rows = self.expanded(x.dtype).reshape(-1, x.shape[-1])
        out = jax.lax.dot_general(x, rows, _CONTRACT_LAST, preferred_element_type=dtype)
        out = out.reshape(len(x), *self.weight.shape[:-1])
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def added_to(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        return residual + self(x)

    def gated(self, x: jax.Array, activation: str) -> jax.Array:
        return gate(self(x), activation)

    def on_hopper(self, device_kind: str) -> TileScaled:
        """See `Portable`."""
        return self
