"""Weights of 8 bits, floats (e4m3) or integers, stored outputs first as matrix units read them.

The products of `ChannelScaled` are of 8 bits on both sides: activations are quantised as they
come, each token by the largest of its own elements. Where a checkpoint brings one scale for all
activations, it is not used: that of the token at hand is never worse.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
from flax import struct

from paged import matmul
from paged.models.quantized.bricks import InBricks, fits_bricks, made
from paged.models.weights import Portable, Unfused

FLOAT8, INT8 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8)
_BF16 = jnp.dtype(jnp.bfloat16)
# Inputs that share a scale where there is more than one for an output.
TILE = 128
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def scaled(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """x [..., K] in `dtype`, each row scaled to fill its range, and the scales [...] float32."""
    largest = matmul.LARGEST[dtype]
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / largest
    scale = jnp.where(scale > 0, scale, 1)
    values = wide / scale[..., None]
    return (jnp.round(values) if dtype == INT8 else values).astype(dtype), scale


@struct.dataclass
class ChannelScaled(Unfused, Portable):
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
        product = jax.lax.dot_general(
            values, self._rows, _CONTRACT_LAST, preferred_element_type=self._sum_dtype(dtype)
        )
        out = product.astype(jnp.float32) * scale[:, None] * self.scale.reshape(-1)
        if self.bias is not None:
            out += self.bias.reshape(-1).astype(jnp.float32)
        return out.astype(dtype).reshape(len(x), *self.scale.shape)

    def on_hopper(self, device_kind: str) -> ChannelScaled:
        """See `Portable`."""
        return HopperChannelScaled(self.weight, self.scale, self.bias, device_kind=device_kind)

    @property
    def _rows(self) -> jax.Array:
        """The weight as [N, K]."""
        return self.weight.reshape(-1, self.weight.shape[-1])

    def _sum_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """What a product comes in: as narrow as the output where sums before scaling fit."""
        if self.weight.dtype == INT8:
            return jnp.dtype(jnp.int32)
        return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


@struct.dataclass
class HopperChannelScaled(ChannelScaled):
    """As `ChannelScaled`, on a Hopper GPU: multiplied by a kernel of ours, scales and all.

    Attributes:
        device_kind: JAX's name of the GPU, by which the kernel is tuned (static).
    """

    device_kind: str = struct.field(pytree_node=False, kw_only=True)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        flat = replace(self, weight=self._rows, scale=self.scale.reshape(-1))
        out = flat._product(x, dtype=dtype)
        if out is None:
            return ChannelScaled.__call__(self, x, dtype)
        out = out.reshape(len(x), *self.scale.shape)
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def added_to(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        out = None if self.bias is not None else self._product(x, residual=residual)
        return ChannelScaled.added_to(self, residual, x) if out is None else out

    def gated(self, x: jax.Array, activation: str) -> jax.Array:
        fits = activation == "silu" and self.bias is None
        out = self._product(x) if fits else None
        return ChannelScaled.gated(self, x, activation) if out is None else out

    def _product(
        self, x: jax.Array, residual: jax.Array | None = None, dtype: jnp.dtype | None = None
    ) -> jax.Array | None:
        """By the kernel, with gates where the weight is [2, F, K]; None where it takes no such."""
        (rows, inputs), outputs = x.shape, self.weight.shape[-2]
        shape = jax.ShapeDtypeStruct(x.shape, self.weight.dtype)
        if not matmul.supports_scaled(shape, self.weight):
            return None
        tiling = matmul.scaled_tiling_for(
            rows,
            inputs,
            outputs,
            device_kind=self.device_kind,
            gated=self.weight.ndim == 3,
            residual=residual is not None,
        )
        if tiling is None:
            return None
        values, scale = matmul.scaled_rows(x, self.weight.dtype)
        return matmul.scaled_matmul(
            values,
            self.weight,
            (scale, self.scale),
            tiling,
            residual=residual,
            out_dtype=jnp.dtype(dtype or x.dtype),
        )


@struct.dataclass
class TileScaled(Unfused, Portable):
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

    def on_hopper(self, device_kind: str) -> TileScaled | InBricks:
        """See `Portable`."""
        *outputs, inputs = self.weight.shape
        if inputs % TILE or not fits_bricks(self.weight, inputs, prod(outputs), TILE, _BF16):
            return self
        return made(_in_bricks, self)


@jax.jit
def _in_bricks(weight: TileScaled) -> InBricks:
    """The same weight, its scales in the floats that activations most often come in."""
    *outputs, inputs = weight.weight.shape
    words = matmul.FP8.words(weight.weight.reshape(-1, inputs))
    scale = weight.scale.reshape(-1, weight.scale.shape[-1]).T.astype(_BF16)
    return InBricks(words, scale, None, None, weight.bias, tuple(outputs))
