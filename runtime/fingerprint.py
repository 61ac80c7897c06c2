"""A name for a model by all of its weights, so that what it once wrote is never another's."""

from __future__ import annotations

from hashlib import blake2b

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def fingerprint(params: object, what: object) -> str:
    """A name for what a model writes to its pages.

    Args:
        params: every weight counts.
        what: all else that matters; its `repr` must tell it from every other.
    """
    leaves = jax.tree.leaves(params)
    sums = [np.asarray(_checksum(_on_device(leaf))).tobytes() for leaf in leaves]
    described = repr((what, [(leaf.shape, leaf.dtype) for leaf in leaves]))
    return blake2b(b"".join(sums) + described.encode(), digest_size=16).hexdigest()


def _on_device(leaf: jax.Array) -> jax.Array:
    """The array itself, or a copy of one that lives in host memory."""
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))


@jax.jit
def _checksum(leaf: jax.Array) -> jax.Array:
    """Two sums of an array's bits, each weighted by its place."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
    bits = leaf.astype(jnp.uint32).ravel()
    places = lax.iota(jnp.uint32, bits.size)
    factors = (2 * places + 1, (places ^ (places >> 15)) * jnp.uint32(0x9E3779B1) | 1)
    return jnp.stack([jnp.sum(bits * factor) for factor in factors])
