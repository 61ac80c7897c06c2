"""Writing to the pages and copying them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.cache import DROPPED, CacheSpec, PagedKVCache, copy_pages, write_kv

SPEC = CacheSpec(
    num_layers=2,
    num_pages=5,
    page_size=4,
    num_kv_heads=2,
    head_dim=8,
    dtype=jnp.dtype(jnp.bfloat16),
)


def random_pages(seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), SPEC.layer_shape).astype(SPEC.dtype)


def random_tokens(count: int) -> tuple[jax.Array, jax.Array]:
    k, v = jax.random.normal(jax.random.key(7), (2, count, SPEC.num_kv_heads, SPEC.head_dim))
    return k, v


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_go_to_their_places_and_nothing_else_changes(count: int) -> None:
    pages = random_pages()
    k, v = random_tokens(count)
    places = [13, 6, 7][:count]
    written = write_kv(pages, k, v, jnp.asarray(places, jnp.int32))
    expected = np.array(pages)
    for place, key, value in zip(places, k, v, strict=True):
        page, offset = divmod(place, SPEC.page_size)
        expected[page, offset] = np.concatenate([key, value]).astype(expected.dtype)
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("count", [1, 3])
def test_padding_tokens_are_dropped(count: int) -> None:
    pages = random_pages()
    nowhere = DROPPED + jnp.arange(count, dtype=jnp.int32)
    written = write_kv(pages, *random_tokens(count), nowhere)
    np.testing.assert_array_equal(written, pages)


def test_pages_are_copied_in_every_layer() -> None:
    layers = (random_pages(0), random_pages(1))
    source, target = jnp.asarray([1, 2, 0]), jnp.asarray([3, 4, DROPPED])
    copied = copy_pages(PagedKVCache(layers), source, target)
    for before, after in zip(layers, copied.layers, strict=True):
        np.testing.assert_array_equal(after, before[jnp.asarray([0, 1, 2, 1, 2])])


def test_bytes_per_page_count_what_is_allocated() -> None:
    cache = PagedKVCache.zeros(SPEC)
    assert sum(layer.nbytes for layer in cache.layers) == SPEC.bytes_per_page * SPEC.num_pages
    shapes = PagedKVCache.shapes(SPEC)
    assert [(s.shape, s.dtype) for s in shapes.layers] == [(x.shape, x.dtype) for x in cache.layers]
