"""Ragged batches over poisoned pages, and what attention over them must give.

Everything that no row may read is NaN: the null page, pages of nobody, the part of a page behind a
sequence's end, pages that a window has left behind, and the tokens that pad a step. The expected
output comes from the sequences themselves, in float64 and without any page.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged.attention import (
    BACKENDS,
    Scoring,
    attention_metadata,
    latent_attention,
    paged_attention,
)
from paged.attention.tiling import BY_RULE, Heads, Tilings
from paged.cache import KV_DTYPES, CacheSpec, Pages, as_stored

Array = np.ndarray[Any, Any]


class Row(NamedTuple):
    """One row of a step: tokens in pages already, and tokens of this step."""

    context: int
    query: int


@dataclass(frozen=True)
class Shape:
    """What a step is compiled for: R rows, T tokens, and P pages in each of S page tables.

    Pages are of `kv_dtype`, by the name that users give it, or of `dtype`. With a `latent_rank`,
    keys are the rows of pages of latents, and values count for nothing.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    latent_rank: int | None = None
    num_rows: int = 10
    num_tokens: int = 512
    max_len: int = 640

    @property
    def pages_per_table(self) -> int:
        return -(-self.max_len // self.page_size)

    @property
    def num_slots(self) -> int:
        return self.num_rows + 2

    @property
    def spec(self) -> CacheSpec:
        return CacheSpec(
            num_layers=1,
            num_pages=self.num_slots * self.pages_per_table + 1,
            page_size=self.page_size,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=KV_DTYPES[self.kv_dtype or self.dtype],
            latent_rank=self.latent_rank,
        )

    @property
    def value_dim(self) -> int:
        return self.latent_rank or self.head_dim

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.head_dim**-0.5, self.window, self.soft_cap)

    @property
    def tolerance(self) -> float:
        return 5e-5 if self.dtype == "float32" else 2e-2


def heads_of(shape: Shape) -> Heads:
    """As far as tilings depend on the shape."""
    pages = jax.eval_shape(lambda: Pages.zeros(shape.spec))
    return Heads.of(jax.ShapeDtypeStruct((1, shape.heads, shape.head_dim), shape.dtype), pages)


@dataclass(frozen=True)
class Batch:
    """A step's arrays, padded to its shape, and the sequences they were cut from.

    Attributes:
        q, k, v: [T, heads, D], NaN where padded.
        pages: NumPy arrays.
        tables: [S, P]; slots, query_len, context_len: [R].
        kv: per row the keys and values of its sequence as pages hold them, NumPy arrays
            [context + query, 2 * Hkv, D], or [.., D] of latents.
        sinks: [Hq], or None.
    """

    rows: Sequence[Row]
    q: Array
    k: Array
    v: Array
    pages: Pages
    tables: Array
    slots: Array
    query_len: Array
    context_len: Array
    kv: list[Pages]
    sinks: Array | None


def make_batch(shape: Shape, rows: Sequence[Row], seed: int = 0) -> Batch:
    """Random sequences for `rows`, their contexts in pages drawn at random."""
    rng = np.random.default_rng(seed)

    def draw(*size: int) -> Array:
        # Rounded to the type of the step, so that the expectation starts from the same numbers.
        return np.asarray(jnp.asarray(rng.standard_normal(size), shape.dtype), np.float32)

    def padded(parts: list[Array], heads: int) -> Array:
        out = np.full((shape.num_tokens, heads, shape.head_dim), np.nan, np.float32)
        tokens = sum(len(part) for part in parts)
        out[:tokens] = np.concatenate(parts) if parts else 0
        return out

    lengths = [row.context + row.query for row in rows]
    keys = [draw(length, shape.kv_heads, shape.head_dim) for length in lengths]
    values = [draw(length, shape.kv_heads, shape.head_dim) for length in lengths]
    queries = [draw(row.query, shape.heads, shape.head_dim) for row in rows]
    slots = rng.permutation(shape.num_slots)[: shape.num_rows].astype(np.int32)
    pairs = zip(keys, values, strict=True)
    latents = shape.latent_rank is not None
    kv = [stored(shape, k[:, 0] if latents else np.concatenate([k, v], axis=1)) for k, v in pairs]
    free = iter(rng.permutation(shape.spec.num_pages - 1) + 1)
    tables = np.zeros((shape.num_slots, shape.pages_per_table), np.int32)
    pages = poisoned_pages(shape)
    for row, slot, tokens in zip(rows, slots, kv, strict=False):
        for entry in range(-(-(row.context + row.query) // shape.page_size)):
            begin = entry * shape.page_size
            end = min(begin + shape.page_size, row.context)
            if shape.window is not None and begin + shape.page_size <= row.context - shape.window:
                continue
            tables[slot, entry] = next(free)
            if begin < end:
                put(pages, (tables[slot, entry], slice(end - begin)), tokens, slice(begin, end))
    padding = [0] * (shape.num_rows - len(rows))
    return Batch(
        rows=rows,
        q=padded(queries, shape.heads),
        k=padded([key[row.context :] for row, key in zip(rows, keys, strict=True)], shape.kv_heads),
        v=padded([v[row.context :] for row, v in zip(rows, values, strict=True)], shape.kv_heads),
        pages=pages,
        tables=tables,
        slots=slots,
        query_len=np.array([row.query for row in rows] + padding, np.int32),
        context_len=np.array([row.context for row in rows] + padding, np.int32),
        kv=kv,
        sinks=2 * rng.standard_normal(shape.heads, np.float32) if shape.sinks else None,
    )


def stored(shape: Shape, tokens: Array) -> Pages:
    """Keys and values as pages hold them, NumPy arrays."""
    held = as_stored(jnp.asarray(tokens, shape.dtype), shape.spec.dtype)
    return jax.tree.map(np.array, held)


def meant(kv: Pages) -> Array:
    """The numbers that stored keys and values stand for, float64."""
    values: Array = np.asarray(kv.values).view(kv.dtype).astype(np.float64)
    if kv.scales is not None:
        pairs = np.asarray(kv.scales)[..., None].view(jnp.bfloat16).astype(np.float64)
        values *= np.concatenate([pairs[..., :1], pairs[..., 1:]], axis=-2)
    return values


def poisoned_pages(shape: Shape) -> Pages:
    """Pages of nothing but NaN, NumPy arrays."""
    pages = jax.tree.map(np.array, Pages.zeros(shape.spec))
    # Scales are two of bfloat16.
    scales = None if pages.scales is None else pages.scales.view(jnp.bfloat16)
    (pages.values.view(pages.dtype) if scales is None else scales)[...] = np.nan
    return pages


def put(pages: Pages, place: Any, tokens: Pages, which: Any) -> None:
    """Store some tokens of a sequence at a place."""
    for target, source in zip(jax.tree.leaves(pages), jax.tree.leaves(tokens), strict=True):
        target[place] = source[which]


def expected_output(shape: Shape, batch: Batch) -> Array:
    """Attention of all tokens of the batch, [tokens, heads, D] float64."""
    done, begin = [np.zeros((0, shape.heads, shape.value_dim))], 0
    for row, tokens in zip(batch.rows, batch.kv, strict=True):
        key, value = keys_and_values(shape, tokens)
        q = batch.q[begin : begin + row.query].astype(np.float64)
        begin += row.query
        group = shape.heads // shape.kv_heads
        scores = np.einsum("qhd,shd->hqs", q, np.repeat(key, group, axis=1)) * shape.scoring.scale
        if shape.soft_cap is not None:
            scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
        distance = row.context + np.arange(row.query)[:, None] - np.arange(len(key))
        hidden = distance < 0
        if shape.window is not None:
            hidden |= distance >= shape.window
        weights = softmax(np.where(hidden, -np.inf, scores), batch.sinks)
        done.append(np.einsum("hqs,shd->qhd", weights, np.repeat(value, group, axis=1)))
    return np.concatenate(done)


def keys_and_values(shape: Shape, tokens: Pages) -> tuple[Array, Array]:
    """Those that stored tokens stand for, each [tokens, Hkv, elements] float64."""
    if shape.latent_rank is not None:
        rows = meant(tokens)[:, None]
        return rows, rows[..., : shape.latent_rank]
    key, value = np.split(meant(tokens), 2, axis=1)
    return key, value


def softmax(scores: Array, sinks: Array | None) -> Array:
    """Weights of scores [Hq, Q, S]; a head's sink takes its part and is left out."""
    if sinks is None:
        sinks = np.full(len(scores), -np.inf)
    column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    scores = np.concatenate([scores, column], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights[..., :-1] / weights.sum(axis=-1, keepdims=True)


def expected_pages(shape: Shape, batch: Batch) -> Pages:
    """The pages after the step: its keys and values in their places, all else untouched."""
    pages = jax.tree.map(np.copy, batch.pages)
    for row, slot, tokens in zip(batch.rows, batch.slots, batch.kv, strict=False):
        for position in range(row.context, row.context + row.query):
            page = batch.tables[slot, position // shape.page_size]
            put(pages, (page, position % shape.page_size), tokens, position)
    return pages


@functools.cache
def step(shape: Shape, backend: str, decode_only: bool, tilings: Tilings = BY_RULE) -> Any:
    """One layer's attention, compiled for a shape."""

    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: Pages,
        tables: jax.Array,
        slots: jax.Array,
        query_len: jax.Array,
        context_len: jax.Array,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, Pages]:
        meta = attention_metadata(
            tables,
            slots,
            query_len,
            context_len,
            num_tokens=shape.num_tokens,
            page_size=shape.page_size,
            tile_size=BACKENDS[backend]().tile_size,
            decode_only=decode_only,
            backend=backend,
            tilings=tilings,
        )
        if shape.latent_rank is not None:
            return latent_attention(q, k[:, 0], pages, meta, shape.scoring)
        return paged_attention(q, k, v, pages, meta, shape.scoring, sinks)

    return jax.jit(run)


def run(
    shape: Shape,
    batch: Batch,
    backend: str,
    decode_only: bool = False,
    tilings: Tilings = BY_RULE,
) -> tuple[Array, Pages]:
    """Output [T, heads, D] float32, and pages after the step as NumPy arrays."""
    floats = (jnp.asarray(x, shape.dtype) for x in (batch.q, batch.k, batch.v))
    # The default product of float32 on a GPU is less precise than what is tested.
    with jax.default_matmul_precision("highest"):
        out, pages = step(shape, backend, decode_only, tilings)(
            *floats,
            jax.tree.map(jnp.asarray, batch.pages),
            batch.tables,
            batch.slots,
            batch.query_len,
            batch.context_len,
            batch.sinks,
        )
    return np.asarray(out, np.float32), jax.tree.map(np.asarray, pages)


def check(
    shape: Shape,
    rows: Sequence[Row],
    backend: str,
    *,
    decode_only: bool = False,
    seed: int = 0,
    tilings: Tilings = BY_RULE,
) -> None:
    """Run `rows` through a backend, and hold output and pages to what they must be."""
    batch = make_batch(shape, rows, seed)
    out, pages = run(shape, batch, backend, decode_only, tilings)
    expected = expected_output(shape, batch)
    np.testing.assert_allclose(
        out[: len(expected)], expected, atol=shape.tolerance, rtol=shape.tolerance
    )
    np.testing.assert_array_equal(meant(pages), meant(expected_pages(shape, batch)))
