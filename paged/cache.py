"""The paged KV cache on the device: one page array per layer, written in place.

A page holds the keys and values of `page_size` consecutive tokens of one sequence for one layer.
Each layer has its own array, so that a donated in-place write never copies a neighbour. Page 0 is
the null page (`paged.pool.NULL_PAGE`): page tables are padded with it and nothing reads it
unmasked.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

DROPPED = 2**30
"""Write indices from here on are beyond any page: what is written there is dropped."""


@dataclass(frozen=True)
class CacheSpec:
    """What one page is made of, and how many there are.

    Attributes:
        num_layers: layers that keep keys and values.
        num_pages: pages per layer, the null page included.
        page_size: tokens a page holds.
        num_kv_heads: key heads (and as many value heads) per layer.
        head_dim: elements of one head.
        dtype: element type of the pages.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """[num_pages, page_size, 2 * num_kv_heads, head_dim]: key heads first, then value heads."""
        return (self.num_pages, self.page_size, 2 * self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_page(self) -> int:
        """Bytes one page takes over all layers."""
        elements = self.page_size * 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * elements * jnp.dtype(self.dtype).itemsize


@struct.dataclass
class PagedKVCache:
    """The pages of every layer, as a pytree that is donated through each step.

    Attributes:
        layers: per layer [num_pages, page_size, 2 * num_kv_heads, head_dim].
    """

    layers: tuple[jax.Array, ...]

    @classmethod
    def zeros(cls, spec: CacheSpec) -> PagedKVCache:
        """Allocate every page, zeroed."""
        return cls(tuple(jnp.zeros(spec.layer_shape, spec.dtype) for _ in range(spec.num_layers)))

    @classmethod
    def shapes(cls, spec: CacheSpec) -> PagedKVCache:
        """The same pytree of shapes without memory, to compile against."""
        return jax.eval_shape(lambda: cls.zeros(spec))


def write_kv(pages: jax.Array, k: jax.Array, v: jax.Array, write_index: jax.Array) -> jax.Array:
    """Store the keys and values of T tokens at their places in one layer's pages.

    Args:
        pages: [num_pages, page_size, 2 * kv_heads, head_dim].
        k, v: [T, kv_heads, head_dim].
        write_index: [T] int32, `page * page_size + offset`, or from DROPPED on for padding tokens.
            All entries differ, which lets XLA write in place with one kernel.
    """
    num_pages, page_size, heads, head_dim = pages.shape
    flat = pages.reshape(num_pages * page_size, heads, head_dim)
    kv = jnp.concatenate([k, v], axis=1).astype(pages.dtype)
    if len(write_index) == 1:
        # XLA rewrites a scatter of one row into a form that copies the whole array on CPU.
        kv = jnp.concatenate([kv, kv])
        write_index = jnp.concatenate([write_index, jnp.full(1, DROPPED + 1, jnp.int32)])
    flat = flat.at[write_index].set(kv, mode="drop", unique_indices=True)
    return flat.reshape(pages.shape)


def copy_pages(cache: PagedKVCache, source: jax.Array, target: jax.Array) -> PagedKVCache:
    """Copy whole pages in every layer, for copy-on-write.

    Args:
        cache: donated.
        source, target: [N] int32 page ids; a target out of range drops its copy. Targets differ,
            and no target is a source of the same call.
    """
    return PagedKVCache(
        tuple(
            pages.at[target].set(pages[source], mode="drop", unique_indices=True)
            for pages in cache.layers
        )
    )
