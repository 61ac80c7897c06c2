"""The threshold in plain XLA: exact, slow on a GPU, and what the kernels are tested against."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from paged.truncation.order import key_of, min_p_key, number_of


def thresholds_reference(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """See `paged.truncation.truncation_thresholds`."""
    peak = logits.max(axis=-1)
    weights = jnp.exp((logits - peak[:, None]) / temperature[:, None])

    def enough(threshold: jax.Array) -> jax.Array:
        return jnp.sum(logits >= threshold[:, None], axis=-1, dtype=jnp.int32) >= top_k

    lowest = number_of(min_p_key(peak, temperature, min_p))
    lowest = jnp.where(top_k < logits.shape[1], jnp.maximum(lowest, _highest(enough, peak)), lowest)

    def mass(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(logits >= threshold[:, None], weights, 0.0), axis=-1)

    wanted = top_p * mass(lowest)
    heavy = _highest(lambda threshold: mass(threshold) >= wanted, peak)
    return jnp.where(top_p < 1, jnp.maximum(lowest, heavy), lowest)


def _highest(holds: Callable[[jax.Array], jax.Array], peak: jax.Array) -> jax.Array:
    """The highest threshold [R] up to `peak` for which `holds`, true of low ones, is true.

    Found bit by bit: 32 passes over the vocabulary, where a sort costs several times more.
    """
    lowest, highest = key_of(jnp.full_like(peak, -jnp.inf)), key_of(peak)

    def bit(index: jax.Array, key: jax.Array) -> jax.Array:
        # In unsigned numbers the whole range of keys is one step of 32 bits.
        step = jnp.uint32(0x80000000) >> index.astype(jnp.uint32)
        room = (highest - key).astype(jnp.uint32)
        higher = jnp.where(step <= room, key + step.astype(jnp.int32), key)
        return jnp.where(holds(number_of(higher)), higher, key)

    return number_of(lax.fori_loop(0, 32, bit, lowest))
