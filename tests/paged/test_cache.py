"""Writing to the pages and copying them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.cache import (
    DROPPED,
    KV_DTYPES,
    CacheSpec,
    PagedKVCache,
    Pages,
    as_stored,
    copy_pages,
    read_pages,
    write_kv,
    write_latents,
    write_pages,
)

dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "int8"])


def spec_of(dtype: str) -> CacheSpec:
    return CacheSpec(
        num_layers=2,
        num_pages=5,
        page_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=KV_DTYPES[dtype],
    )


def random_pages(spec: CacheSpec, seed: int = 0) -> Pages:
    shape = spec.num_pages, spec.page_size, 2 * spec.num_kv_heads, spec.head_dim
    return as_stored(jax.random.normal(jax.random.key(seed), shape), spec.dtype)


def random_tokens(spec: CacheSpec, count: int) -> tuple[jax.Array, jax.Array]:
    k, v = jax.random.normal(jax.random.key(7), (2, count, spec.num_kv_heads, spec.head_dim))
    return k, v


def assert_equal(pages: Pages, expected: Pages) -> None:
    jax.tree.map(np.testing.assert_array_equal, pages, expected)


@dtypes
@pytest.mark.parametrize("count", [1, 3])
def test_tokens_go_to_their_places_and_nothing_else_changes(dtype: str, count: int) -> None:
    spec = spec_of(dtype)
    pages = random_pages(spec)
    k, v = random_tokens(spec, count)
    places = [13, 6, 7][:count]
    written = write_kv(pages, k, v, jnp.asarray(places, jnp.int32))
    tokens = as_stored(jnp.concatenate([k, v], axis=1), spec.dtype)

    def put(before: jax.Array, new: jax.Array) -> np.ndarray:
        expected = np.array(before)
        for place, token in zip(places, new, strict=True):
            expected[divmod(place, spec.page_size)] = token
        return expected

    assert_equal(written, jax.tree.map(put, pages, tokens))


@dtypes
@pytest.mark.parametrize("count", [1, 3])
def test_padding_tokens_are_dropped(dtype: str, count: int) -> None:
    spec = spec_of(dtype)
    pages = random_pages(spec)
    nowhere = DROPPED + jnp.arange(count, dtype=jnp.int32)
    assert_equal(write_kv(pages, *random_tokens(spec, count), nowhere), pages)


@dtypes
def test_pages_are_copied_in_every_layer(dtype: str) -> None:
    spec = spec_of(dtype)
    layers = (random_pages(spec, 0), random_pages(spec, 1))
    source, target = jnp.asarray([1, 2, 0]), jnp.asarray([3, 4, DROPPED])
    copied = copy_pages(PagedKVCache(layers, spec.homes), source, target)
    for before, after in zip(layers, copied.layers, strict=True):
        which = jnp.asarray([0, 1, 2, 1, 2])
        assert_equal(after, jax.tree.map(lambda x, which=which: x[which], before))


def check_round_trip(spec: CacheSpec, layers: tuple[Pages, ...]) -> None:
    """Two pages are read, and written to others; what comes with them is dropped."""
    cache = PagedKVCache(layers, spec.homes)
    stacks = read_pages(cache, jnp.asarray([[1, 2], [0, 0]]))
    assert sum(part.nbytes for stack in stacks for part in stack) == 4 * spec.bytes_per_page
    for part, leaf in zip(stacks[0], jax.tree.leaves(layers[1]), strict=True):
        np.testing.assert_array_equal(part[1, 1], leaf[2])
    target = jnp.asarray([[4, 3], [spec.num_pages, spec.num_pages + 1]])
    written, done = write_pages(cache, target, stacks)
    assert done == target.sum()
    for before, after in zip(layers, written.layers, strict=True):
        which = jnp.asarray([0, 1, 2, 2, 1])
        assert_equal(after, jax.tree.map(lambda x, which=which: x[which], before))


@dtypes
def test_pages_that_were_read_are_written_elsewhere(dtype: str) -> None:
    spec = spec_of(dtype)
    check_round_trip(spec, (random_pages(spec, 0), random_pages(spec, 1)))


LATENTS = CacheSpec(2, 5, 4, 1, 10, KV_DTYPES["bfloat16"], latent_rank=7)


def test_latents_are_written_and_copied_as_rows() -> None:
    pages = Pages.zeros(LATENTS)
    rows = jnp.arange(1, 21, dtype=jnp.float32).reshape(2, 10)
    written = write_latents(pages, rows, jnp.asarray([13, DROPPED], jnp.int32))
    assert (written.kv_heads, written.latent_rank) == (1, 7)
    np.testing.assert_array_equal(written.values[3, 1], rows[0])
    assert jnp.count_nonzero(written.values) == 10, "and nothing else"
    one = write_latents(pages, rows[:1], jnp.asarray([13], jnp.int32))
    assert_equal(one, written)
    cache = PagedKVCache((written,), LATENTS.homes[:1])
    copied = copy_pages(cache, jnp.asarray([3]), jnp.asarray([4])).layers[0]
    np.testing.assert_array_equal(copied.values[4], written.values[3])


def test_pages_of_latents_are_read_and_written() -> None:
    values = jax.random.normal(jax.random.key(0), (2, 5, 4, 10)).astype(LATENTS.dtype)
    check_round_trip(
        LATENTS, tuple(Pages(layer, None, LATENTS.dtype, LATENTS.latent_rank) for layer in values)
    )


@pytest.mark.parametrize(
    "spec", [*map(spec_of, ("bfloat16", "fp8", "int8")), LATENTS], ids=lambda spec: str(spec.dtype)
)
def test_bytes_per_page_count_what_is_allocated(spec: CacheSpec) -> None:
    arrays = jax.tree.leaves(PagedKVCache.zeros(spec))
    assert sum(array.nbytes for array in arrays) == spec.bytes_per_page * spec.num_pages
    shapes = jax.tree.leaves(PagedKVCache.shapes(spec))
    assert [(s.shape, s.dtype) for s in shapes] == [(x.shape, x.dtype) for x in arrays]


@pytest.mark.parametrize(("dtype", "limit"), [("fp8", 448), ("fp8_e5m2", 57344)])
def test_floats_of_8_bits_are_rounded_and_saturate(dtype: str, limit: int) -> None:
    exact = [0, 1.25, -0.875, 2.0**-9, limit, -limit]
    values = jnp.asarray([*exact, 1.0625, 2 * limit, -1e9, np.nan], jnp.float32)
    stored = as_stored(values, KV_DTYPES[dtype])
    assert stored.scales is None
    wide = np.asarray(stored.values.view(stored.dtype), np.float32)
    np.testing.assert_array_equal(wide, [*exact, 1, limit, -limit, np.nan])


def test_integers_of_8_bits_err_by_half_a_step_of_their_head() -> None:
    """Whatever the size of a head's elements, and though scales are of 8 significant bits."""
    kv = jax.random.normal(jax.random.key(0), (4096, 6, 64))
    kv *= 10.0 ** jax.random.randint(jax.random.key(1), (4096, 6, 1), -9, 9)
    stored = as_stored(kv.at[0, 0].set(0), KV_DTYPES["int8"])
    assert stored.scales is not None
    pairs = np.asarray(stored.scales)[..., None].view(jnp.bfloat16).astype(np.float64)
    scales = np.concatenate([pairs[..., :1], pairs[..., 1:]], axis=1)
    exact = np.asarray(kv.at[0, 0].set(0), np.float64)
    values = np.asarray(stored.values).view(stored.dtype)
    assert np.all(np.abs(values * scales - exact) <= 0.5001 * scales)
    steps = np.abs(exact).max(axis=-1, keepdims=True)[1:] / scales[1:]
    assert np.all(np.abs(steps - 127) < 0.5)
