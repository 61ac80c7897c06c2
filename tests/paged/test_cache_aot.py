"""Moves of pages to the host and back, compiled for an H200: in place, and no copy of a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from paged.cache import KV_DTYPES, CacheSpec, PagedKVCache, read_pages, write_pages
from tests.paged import aot

pytestmark = pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]")

NUM_PAGES, NUM_STACKS = 64, 4


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_pages_are_moved_in_place(dtype: str) -> None:
    spec = CacheSpec(2, 5000, 16, 8, 128, KV_DTYPES[dtype])
    cache = PagedKVCache.shapes(spec)
    pages = jax.ShapeDtypeStruct((NUM_STACKS, NUM_PAGES // NUM_STACKS), jnp.int32)
    stack = jax.eval_shape(read_pages, cache, pages)
    moved = NUM_PAGES * spec.bytes_per_page

    memory = aot.compile_for_h200(read_pages, cache, pages).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1.1 * moved
    assert memory.output_size_in_bytes < 1.1 * moved

    program = aot.compile_for_h200(write_pages, cache, pages, stack, donate=(0,))
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= spec.num_pages * spec.bytes_per_page
    assert memory.temp_size_in_bytes < 1.1 * moved
