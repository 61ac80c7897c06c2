"""The paged KV cache on the device: the pages of each layer, written in place.

A page holds the keys and values of `page_size` consecutive tokens of one sequence, for the layers
of one group (see `paged.groups`). Each layer of a group has its own arrays, so that a donated
in-place write never copies a neighbour. Page 0 is the null page (`paged.pool.NULL_PAGE`): page
tables are padded with it and nothing reads it unmasked.

Models with latent attention (DeepSeek) keep a single row for a token, the key for all query heads;
its first elements, the latent, are the value too.

Pages of 8 bits hold twice as much. Floats of 8 bits are rounded, and saturate where a key or value
is beyond their range. Integers of 8 bits are a head of a token each relative to its largest
element, and its scale stands beside the page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from paged.groups import LayerGroup, Windows

DROPPED = 2**30
"""Write indices from here on are beyond any page: what is written there is dropped."""

KV_DTYPES = {
    "float32": jnp.dtype(jnp.float32),
    "bfloat16": jnp.dtype(jnp.bfloat16),
    "float16": jnp.dtype(jnp.float16),
    "fp8": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e5m2": jnp.dtype(jnp.float8_e5m2),
    "int8": jnp.dtype(jnp.int8),
}
"""Element types of pages, by the name that users give them."""

WORD = jnp.dtype(jnp.uint16)
"""What holds two values of 8 bits."""

SCALES = jnp.dtype(jnp.uint32)
"""What holds the scales of a key head and of its value head, both bfloat16, the key's first."""


def has_scales(dtype: jnp.dtype) -> bool:
    """Whether pages of this type need scales beside them."""
    return jnp.issubdtype(dtype, jnp.integer)


class Home(NamedTuple):
    """Where a layer keeps keys and values: in the pages of its group's tables, in which array."""

    group: int
    array: int


@dataclass(frozen=True)
class CacheSpec:
    """What one page is made of, and how many there are.

    Attributes:
        num_layers: layers that a page holds keys and values of: those of one group.
        num_pages: pages, the null page included.
        page_size: tokens a page holds.
        num_kv_heads: key heads (and as many value heads) per layer.
        head_dim: elements of one head.
        dtype: element type of the pages, one of KV_DTYPES.
        groups: the layers that share page tables; empty if all of the model's do.
        of_layers: layers of the model, if some of them keep their tokens elsewhere: `groups` then
            have those that do not.
        latent_rank: elements of the latent, of pages that hold a single row of head_dim elements
            for a token (num_kv_heads is 1), never in 8 bits; None for keys and values.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    groups: tuple[LayerGroup, ...] = ()
    latent_rank: int | None = None
    of_layers: int | None = None

    @property
    def homes(self) -> tuple[Home | None, ...]:
        """Where each layer of the model keeps its tokens; None for those elsewhere."""
        if not self.groups:
            return tuple(Home(0, layer) for layer in range(self.num_layers))
        homes = {
            layer: Home(group, array)
            for group, each in enumerate(self.groups)
            for array, layer in enumerate(each.layers)
        }
        return tuple(homes.get(layer) for layer in range(self.of_layers or len(homes)))

    @property
    def windows(self) -> Windows:
        """Of each group: a sequence has as many page tables."""
        return tuple(group.window for group in self.groups) or (None,)

    @property
    def bytes_per_page(self) -> int:
        """Bytes one page takes over the layers of a group, scales included."""
        if self.latent_rank is not None:
            return self.num_layers * self.page_size * self.head_dim * self.dtype.itemsize
        bytes_per_pair = 2 * self.head_dim * self.dtype.itemsize
        if has_scales(self.dtype):
            bytes_per_pair += SCALES.itemsize
        return self.num_layers * self.page_size * self.num_kv_heads * bytes_per_pair


@struct.dataclass
class Pages:
    """The pages of one layer.

    Values of 8 bits are held in pairs, as a WORD. Tensor cores take no fewer than 16 bits from
    where a kernel has copied values; and where hardware has no floats of 8 bits, XLA does all with
    them in wider ones, and would copy a whole cache to write a token.

    Attributes:
        values: [num_pages, page_size, 2 * Hkv, D], or [.., D / 2] of words: the key heads of a
            token, then its value heads. Of latents [num_pages, page_size, D].
        scales: [num_pages, page_size, Hkv] of SCALES, by which the values of heads are to be
            multiplied; None where they stand for themselves.
        dtype: what the values are (static).
        latent_rank: elements of the latent; None for keys and values (static).
    """

    values: jax.Array
    scales: jax.Array | None
    dtype: jnp.dtype = struct.field(pytree_node=False)
    latent_rank: int | None = struct.field(pytree_node=False, default=None)

    @property
    def kv_heads(self) -> int:
        return 1 if self.latent_rank is not None else self.values.shape[2] // 2

    @classmethod
    def zeros(cls, spec: CacheSpec) -> Pages:
        """Allocate the pages of a layer, zeroed."""
        rows = spec.num_pages, spec.page_size
        if spec.latent_rank is not None:
            values = jnp.zeros((*rows, spec.head_dim), spec.dtype)
            return cls(values, None, spec.dtype, spec.latent_rank)
        words = spec.dtype.itemsize == 1
        size = spec.head_dim // 2 if words else spec.head_dim
        values = jnp.zeros((*rows, 2 * spec.num_kv_heads, size), WORD if words else spec.dtype)
        scales = jnp.zeros((*rows, spec.num_kv_heads), SCALES) if has_scales(spec.dtype) else None
        return cls(values, scales, spec.dtype)


@struct.dataclass
class PagedKVCache:
    """The pages of every layer, as a pytree that is donated through each step.

    Attributes:
        layers: those of one layer of each group (see `paged.groups`).
        homes: of the model's layers (static); None of those whose pages are elsewhere.
        relay: while a step runs whose layers are not all here, the hidden states [T, D] that come
            from those before, and then those that are for the ones behind; else None.
    """

    layers: tuple[Pages, ...]
    homes: tuple[Home | None, ...] = struct.field(pytree_node=False)
    relay: jax.Array | None = None

    @classmethod
    def zeros(cls, spec: CacheSpec) -> PagedKVCache:
        """Allocate every page, zeroed."""
        return cls(tuple(Pages.zeros(spec) for _ in range(spec.num_layers)), spec.homes)

    @classmethod
    def shapes(cls, spec: CacheSpec) -> PagedKVCache:
        """The same pytree of shapes without memory, to compile against."""
        return jax.eval_shape(lambda: cls.zeros(spec))


def write_kv(pages: Pages, k: jax.Array, v: jax.Array, write_index: jax.Array) -> Pages:
    """Store the keys and values of T tokens at their places in one layer's pages.

    Args:
        k, v: [T, Hkv, D].
        write_index: [T] int32, `page * page_size + offset`, or from DROPPED on for padding tokens.
            All entries differ, which lets XLA write in place with one kernel.
    """
    return _write(pages, jnp.concatenate([k, v], axis=1), write_index)


def write_latents(pages: Pages, rows: jax.Array, write_index: jax.Array) -> Pages:
    """Store the rows [T, D] of T tokens in pages of latents; see `write_kv`."""
    return _write(pages, rows, write_index)


def _write(pages: Pages, heads: jax.Array, write_index: jax.Array) -> Pages:
    """Store `heads` [T, 2 * Hkv, D], or rows [T, D], as they lie in a token's place."""
    if len(write_index) == 1:
        # XLA rewrites a scatter of one row into a form that copies the whole array on CPU.
        heads = jnp.concatenate([heads, heads])
        write_index = jnp.concatenate([write_index, jnp.full(1, DROPPED + 1, jnp.int32)])

    def write(stored: jax.Array, new: jax.Array) -> jax.Array:
        flat = stored.reshape(-1, *stored.shape[2:])
        flat = flat.at[write_index].set(new, mode="drop", unique_indices=True)
        return flat.reshape(stored.shape)

    held = replace(as_stored(heads, pages.dtype), latent_rank=pages.latent_rank)
    return jax.tree.map(write, pages, held)


def as_stored(kv: jax.Array, dtype: jnp.dtype) -> Pages:
    """Heads of keys and of values [..., 2 * Hkv, D], or rows, as pages of `dtype` hold them."""
    scales = None
    if has_scales(dtype):
        kv, scales = _to_integers(kv, dtype)
    elif kv.dtype != dtype:
        limit = float(jnp.finfo(dtype).max)
        kv = jnp.clip(kv, -limit, limit).astype(dtype)
    return Pages(kv.view(WORD) if dtype.itemsize == 1 else kv, scales, dtype)


def _to_integers(kv: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Heads [..., 2 * Hkv, D] as integers of `dtype`, and their scales [..., Hkv]."""
    wide = kv.astype(jnp.float32)
    largest = int(jnp.iinfo(dtype).max)
    # Rounding the scale first costs no precision: values are rounded to multiples of what is kept.
    scales = (jnp.abs(wide).max(axis=-1) / largest).astype(jnp.bfloat16)
    steps = wide / jnp.where(scales > 0, scales, 1).astype(jnp.float32)[..., None]
    pairs = jnp.stack(jnp.split(scales, 2, axis=-1), axis=-1)
    values = jnp.clip(jnp.round(steps), -largest, largest).astype(dtype)
    return values, lax.bitcast_convert_type(pairs, SCALES)


def copy_pages(cache: PagedKVCache, source: jax.Array, target: jax.Array) -> PagedKVCache:
    """Copy whole pages in every layer, for copy-on-write.

    Args:
        cache: donated.
        source, target: [N] int32 page ids; a target out of range drops its copy. Targets differ,
            and no target is a source of the same call.
    """

    def copy(stored: jax.Array) -> jax.Array:
        return stored.at[target].set(stored[source], mode="drop", unique_indices=True)

    return jax.tree.map(copy, cache)


PageStack = tuple[jax.Array, ...]
"""Pages over the layers of a group: values [N, layers, page_size, ..], then scales if there are."""


def read_pages(cache: PagedKVCache, source: jax.Array) -> tuple[PageStack, ...]:
    """The content of pages [S, N] int32, to be kept elsewhere: a stack for each row of them."""
    leaves = [*zip(*(jax.tree.leaves(layer) for layer in cache.layers), strict=True)]
    return tuple(
        tuple(jnp.stack([stored[pages] for stored in leaf], axis=1) for leaf in leaves)
        for pages in source
    )


def write_pages(
    cache: PagedKVCache, target: jax.Array, stacks: tuple[PageStack, ...]
) -> tuple[PagedKVCache, jax.Array]:
    """Store what `read_pages` gave in other pages.

    Args:
        cache: donated.
        target: [S, N] int32, all different; what goes to one out of range is dropped.

    Returns:
        The cache, and a number that is there once everything is stored.
    """
    parts, pages_of_all = [*zip(*stacks, strict=True)], target.reshape(-1)

    def store(layer: int, pages: Pages) -> Pages:
        leaves, form = jax.tree.flatten(pages)
        new = [
            stored.at[pages_of_all].set(
                jnp.concatenate([stack[:, layer] for stack in part]),
                mode="drop",
                unique_indices=True,
            )
            for stored, part in zip(leaves, parts, strict=True)
        ]
        return jax.tree.unflatten(form, new)

    layers = tuple(store(layer, pages) for layer, pages in enumerate(cache.layers))
    return replace(cache, layers=layers), jnp.sum(target)
