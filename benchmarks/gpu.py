"""What benchmarks of kernels share: the GPU's own clock, its ceilings, numbers to compute with."""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.floors import Ceilings

DTYPE = jnp.bfloat16
RUNS = 5

Kernels = list[tuple[str, float]]
"""Name and milliseconds of each kernel, in the order they ran."""


def gpu_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line of a program that needs a GPU; an error where JAX has none."""
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU, but JAX runs on {jax.default_backend()}")
    # Says at each kernel that its backend will go one day.
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    return options


def page_tables(shape: tuple[int, int], num_pages: int, count: int) -> list[jax.Array]:
    """Tables [rows, P] int32 of pages anywhere in a pool but at its null page, always the same."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(1, num_pages, shape), jnp.int32) for _ in range(count)]


def kernels(run: Callable[[], object]) -> Kernels:
    """Of a call that waits for what it launches.

    By the part of JAX that `jax.experimental.mosaic.gpu.profiler.measure` is made of: that itself
    calls a function again with the same arguments, which a donated cache does not bear.
    """
    cupti: Any = vars(importlib.import_module("jax._src.lib.mosaic_gpu"))["_mosaic_gpu_ext"]
    cupti._cupti_init()
    try:
        run()
    finally:
        found = cupti._cupti_get_timings(True)
    return found


def repeated(function: Callable[..., Any], *args: Any) -> tuple[Any, list[Kernels]]:
    """What a function returns, and its kernels in each of some runs."""
    outputs, found = profiler.measure(function, aggregate=False, iterations=RUNS)(*args)
    if not found:
        raise RuntimeError("CUPTI saw no kernel; is another profiler attached?")
    return outputs, found


def median_microseconds(runs: list[Kernels], name: str = "") -> float:
    """Of all kernels of a run whose names contain `name`."""
    return 1e3 * statistics.median(sum(ms for kernel, ms in run if name in kernel) for run in runs)


@functools.partial(jax.jit, static_argnums=1)
def random(seed: int, shape: tuple[int, ...], variance: float = 1.0) -> jax.Array:
    """Numbers of about this variance around 0, cheap to make in gigabytes."""
    bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint8)
    return ((bits.astype(jnp.float32) - 127.5) / 74 * variance**0.5).astype(DTYPE)


@jax.jit
def difference(found: jax.Array, expected: jax.Array) -> jax.Array:
    """The norm of the difference, relative to the norm of the expected; worked out in float32."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)


def ceilings() -> Ceilings:
    """What this GPU reads, summing 2 GiB, and multiplies, in a product of 8192 rows and columns."""
    summed, square = jnp.ones(2**30, DTYPE), random(2, (8192, 8192))
    read = repeated(jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32)), summed)[1]
    product = repeated(jax.jit(jnp.dot), square, square)[1]
    return Ceilings(
        bytes_per_second=summed.nbytes / median_microseconds(read) * 1e6,
        flop_per_second=2 * 8192**3 / median_microseconds(product) * 1e6,
    )
