"""Thresholds as integers in the order of float32 numbers, so that one can be halved towards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def key_of(x: jax.Array) -> jax.Array:
    """int32 keys in the order of float32 `x`, the same for zeros of both signs."""
    return _flip(lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32))


def number_of(key: jax.Array) -> jax.Array:
    """The float32 numbers that have these keys."""
    return lax.bitcast_convert_type(_flip(key), jnp.float32)


def _flip(bits: jax.Array) -> jax.Array:
    """Turn round the order of negative numbers, whose bits grow with size; its own inverse."""
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def min_p_key(peak: jax.Array, temperature: jax.Array, min_p: jax.Array) -> jax.Array:
    """The key of the lowest logit that is `min_p` times as likely as that at `peak`; -inf for 0."""
    distance = temperature * jnp.log(min_p)
    lowest = peak + distance
    # Rounded to nearest, the sum may lie one number too low; differences near the peak are exact.
    return key_of(lowest) + (lowest - peak < distance).astype(jnp.int32)
