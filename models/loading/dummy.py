"""Random weights made on the device, for benchmarks and tests without a checkpoint."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from paged.models.weights import Init

_DEVIATION = 0.02


def random_params(specs: Any, dtype: jnp.dtype, *, seed: int = 0, sharding: Any = None) -> Any:
    """Parameters as described, drawn from N(0, 0.02); norms are one and biases zero.

    Args:
        specs: pytree of `ParamSpec`.
        sharding: None for the default device, or a pytree of shardings like `specs`.
    """
    leaves, structure = jax.tree.flatten(specs)
    shardings = [None] * len(leaves) if sharding is None else structure.flatten_up_to(sharding)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    params = [
        _initializer(spec.init, spec.shape, dtype, target)(key)
        for spec, target, key in zip(leaves, shardings, keys, strict=True)
    ]
    return jax.block_until_ready(structure.unflatten(params))


@cache
def _initializer(init: Init, shape: tuple[int, ...], dtype: jnp.dtype, sharding: Any) -> Any:
    """A compiled initializer, one for each distinct shape."""
    return jax.jit(partial(_INITS[init], shape=shape, dtype=dtype), out_shardings=sharding)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return _DEVIATION * jax.random.normal(key, shape, dtype)


def _ones(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.ones(shape, dtype)


def _zeros(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.zeros(shape, dtype)


_INITS = {"normal": _normal, "ones": _ones, "zeros": _zeros}
