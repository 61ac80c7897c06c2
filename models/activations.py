"""What an MLP bends its inner values by, under the names that config.json has for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclass(frozen=True)
class ClampedSwiglu:
    """gate * sigmoid(alpha * gate) * (up + 1): gate is at most `limit`, and up within ±`limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


def activate(x: jax.Array, activation: str) -> jax.Array:
    """activation(x), worked out in float32, in x's dtype; for an MLP without a gate."""
    return ACTIVATIONS[activation](x.astype(jnp.float32)).astype(x.dtype)


def gate(both: jax.Array, activation: str | ClampedSwiglu) -> jax.Array:
    """activation(gate) * up [T, F] of both [T, 2, F], worked out in float32, in their dtype.

    A `ClampedSwiglu` says itself what becomes of the two.
    """
    gate, up = both[:, 0].astype(jnp.float32), both[:, 1].astype(jnp.float32)
    if isinstance(activation, ClampedSwiglu):
        return activation(gate, up).astype(both.dtype)
    return (ACTIVATIONS[activation](gate) * up).astype(both.dtype)
