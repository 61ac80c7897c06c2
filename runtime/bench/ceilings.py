"""What a device can do at best: bytes it reads and operations of a large product, per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from paged.runtime.bench.results import Ceilings

_RUNS = 10


@dataclass(frozen=True)
class _Sizes:
    """Of what is measured: bytes that are summed, and rows and columns of the product."""

    read: int
    product: int


_SIZES = {"cpu": _Sizes(2**28, 1024)}
_OF_OTHERS = _Sizes(2**31, 8192)


def measure_ceilings(dtype: jnp.dtype) -> Ceilings:
    """The best of some runs on the default device, in numbers of this type."""
    sizes = _SIZES.get(jax.default_backend(), _OF_OTHERS)
    numbers = jnp.ones(sizes.read // jnp.dtype(dtype).itemsize, dtype)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    read = _least_seconds(lambda: total(numbers))
    numbers.delete()
    key = jax.random.key(0)
    square = jax.random.normal(key, (sizes.product, sizes.product), dtype)
    product = jax.jit(jnp.dot)
    multiplied = _least_seconds(lambda: product(square, square))
    return Ceilings(sizes.read / read, 2 * sizes.product**3 / multiplied)


def _least_seconds(run: Callable[[], jax.Array]) -> float:
    run().block_until_ready()  # compiled, and its memory taken
    return min(_seconds(run) for _ in range(_RUNS))


def _seconds(run: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    run().block_until_ready()
    return time.perf_counter() - start
