"""Attention over pages: what a step tells it, and the choice of implementation.

A step is a ragged batch of R rows (sequences) over T flat tokens. Row r owns the `query_len[r]`
tokens that start at `query_start[r]`; `context_len[r]` earlier tokens of its sequence are in pages
already. Every token's key and value is written to its page first, then each token attends to all
positions of its sequence up to its own.

Rows of one token (decode) and longer rows (chunks of a prompt) take different paths: decode reads
each page once for all its query heads, chunks run in tiles of `tile_size` tokens of one sequence.

Axis letters used on this floor: T flat tokens, R rows, S slots, P pages a page table holds,
Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head size, C elements of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from paged.attention.metadata import AttentionMetadata, attention_metadata
from paged.attention.scoring import Scoring
from paged.cache import Pages, write_kv, write_latents

__all__ = [
    "BACKENDS",
    "AttentionMetadata",
    "Scoring",
    "attention_metadata",
    "default_backend",
    "latent_attention",
    "left_to_others",
    "paged_attention",
]


class DecodeAttention(Protocol):
    """Attention of one query token per row.

    `q` [R, Hq, D]; `lengths` [R] positions visible to the row, 0 for a row with no query, whose
    output is then unspecified; for `scoring` and `sinks` see `paged_attention`. Returns
    [R, Hq, D] in q's dtype; of pages of latents [R, Hq, C].
    """

    def __call__(
        self,
        q: jax.Array,
        pages: Pages,
        lengths: jax.Array,
        meta: AttentionMetadata,
        scoring: Scoring,
        sinks: jax.Array | None,
    ) -> jax.Array: ...


class PrefillAttention(Protocol):
    """Attention of the tokens of all rows longer than one token, tile by tile.

    `q` [T, Hq, D]; for `scoring` and `sinks` see `paged_attention`. Returns [T, Hq, D] in q's
    dtype, of pages of latents [T, Hq, C]; the output of other tokens is unspecified.
    """

    def __call__(
        self,
        q: jax.Array,
        pages: Pages,
        meta: AttentionMetadata,
        scoring: Scoring,
        sinks: jax.Array | None,
    ) -> jax.Array: ...


class Backend(NamedTuple):
    """One implementation of both paths, and the tile size its prefill wants (tokens)."""

    decode: DecodeAttention
    prefill: PrefillAttention
    tile_size: int


def _xla() -> Backend:
    from paged.attention import reference

    return Backend(reference.decode_attention, reference.prefill_attention, reference.TILE_SIZE)


def _triton() -> Backend:
    from paged.attention import triton

    return Backend(triton.decode_attention, triton.prefill_attention, triton.TILE_SIZE)


def _mosaic() -> Backend:
    from paged.attention import mosaic

    return Backend(mosaic.decode_attention, mosaic.prefill_attention, mosaic.TILE_SIZE)


BACKENDS: dict[str, Callable[[], Backend]] = {
    "xla": _xla,
    "triton": _triton,
    "mosaic": _mosaic,
}


def default_backend(device: jax.Device) -> str:
    """The fastest backend for a device: Mosaic on Hopper, Triton on other NVIDIA GPUs.

    GPUs before Ampere (compute capability 8.0) are left to XLA: Triton compiles for none of them.
    """
    if device.platform not in ("gpu", "cuda"):
        return "xla"
    capability = float(getattr(device, "compute_capability", 0))
    return "mosaic" if capability == 9.0 else "triton" if capability >= 8.0 else "xla"


def left_to_others(backend: str, q: jax.ShapeDtypeStruct, pages: Pages) -> list[str]:
    """What of attention a backend leaves to a slower one for such arrays, and why.

    `q` [T, Hq, D]; `pages` holds shapes.
    """
    if backend != "mosaic":
        return []
    from paged.attention.mosaic import decode, prefill

    of_prompts, of_decoding = prefill.obstacle(q, pages), decode.obstacle(q, pages)
    if of_prompts and of_decoding:
        return [f"attention runs by triton, not by mosaic: {of_prompts}"]
    if of_prompts:
        return [f"attention of prompts runs by triton, not by mosaic: {of_prompts}"]
    if of_decoding:
        return [f"attention of decode steps runs by triton, not by mosaic: {of_decoding}"]
    return []


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Pages]:
    """Write this step's keys and values into one layer's pages, then attend over the pages.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D], after rotary embedding.
        pages: updated in place when donated.
        scoring: what becomes of a product q·k.
        sinks: [Hq] float32, a score of each query head that joins the softmax of every query as
            one more position would that has no value (gpt-oss); neither scaled nor capped.

    Returns:
        (attention output [T, Hq, D] in q's dtype, updated pages).
    """
    pages = write_kv(pages, k, v, meta.write_index)
    return _attention(q, pages, meta, scoring, sinks), pages


def latent_attention(
    q: jax.Array, rows: jax.Array, pages: Pages, meta: AttentionMetadata, scoring: Scoring
) -> tuple[jax.Array, Pages]:
    """As `paged_attention` over pages of latents, all query heads with one key and one value.

    A token is a single row, the key of all heads; its first C elements, the latent, are the value.
    Heads that once had keys and values of their own are brought here by their queries, and what
    comes back are averages of latents, from which each head makes its own output.

    Args:
        q: [T, Hq, D], in the coordinates of rows.
        rows: [T, D].

    Returns:
        (averages of latents [T, Hq, C] in q's dtype, updated pages).
    """
    pages = write_latents(pages, rows, meta.write_index)
    return _attention(q, pages, meta, scoring, None), pages


def _attention(
    q: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention over pages that hold this step's tokens already."""
    backend = BACKENDS[meta.backend]()
    is_decode = meta.query_len == 1
    lengths = jnp.where(is_decode, meta.context_len + 1, 0)
    if meta.decode_only:
        return backend.decode(q, pages, lengths, meta, scoring, sinks)
    decoded = backend.decode(q[meta.query_start], pages, lengths, meta, scoring, sinks)
    out = backend.prefill(q, pages, meta, scoring, sinks)
    num_tokens = q.shape[0]
    rows = jnp.arange(is_decode.shape[0])
    target = jnp.where(is_decode, meta.query_start, num_tokens + rows)
    return out.at[target].set(decoded, mode="drop", unique_indices=True)
