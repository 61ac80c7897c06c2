"""What an MLP bends its inner values by, under the names that config.json has for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


def gate(both: jax.Array, activation: str) -> jax.Array:
    """activation(gate) * up [T, F] of both [T, 2, F], worked out in float32, in their dtype."""
    gate, up = both[:, 0].astype(jnp.float32), both[:, 1].astype(jnp.float32)
    return (ACTIVATIONS[activation](gate) * up).astype(both.dtype)
