"""Random weights made on the device, for benchmarks and tests without a checkpoint."""

from __future__ import annotations

import zlib
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from paged.models.weights import ParamSpec


def random_params(specs: Any, dtype: jnp.dtype, *, seed: int = 0, sharding: Any = None) -> Any:
    """Parameters as described, drawn from N(0, 0.02); norms are one and biases zero.

    Args:
        specs: pytree of `ParamSpec`.
        sharding: None for the default device, or a pytree of shardings like `specs`.
    """
    root = jax.random.key(seed)
    trees = (specs,) if sharding is None else (specs, sharding)

    def initialize(spec: ParamSpec, target: Any = None) -> jax.Array:
        # Drawn by name, so that a parameter does not change with what stands beside it.
        key = jax.random.fold_in(root, zlib.crc32(spec.parts[0].name.encode()))
        return spec.at_home(_initializer(spec.anonymous(), spec.dtype_among(dtype), target)(key))

    return jax.block_until_ready(jax.tree.map(initialize, *trees))


@cache
def _initializer(spec: ParamSpec, dtype: jnp.dtype, sharding: Any) -> Any:
    """A compiled initializer, one for each distinct make."""
    return jax.jit(partial(spec.random, dtype=dtype), out_shardings=sharding)
