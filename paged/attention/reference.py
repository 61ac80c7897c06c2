"""Attention over pages in plain XLA: right everywhere, and fast enough to serve on a CPU.

Both paths walk the context in spans of `SPAN` positions with a running maximum and sum (online
softmax, Milakov and Gimelshein 2018), as many spans as the longest row needs: the work follows
the real lengths although the shapes are static, and the result of a row does not depend on the
page size or on what else is in the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from paged.attention.metadata import AttentionMetadata
from paged.attention.scoring import MASKED, Scoring
from paged.cache import Pages

TILE_SIZE = 64
SPAN = 128

Running = tuple[jax.Array, jax.Array, jax.Array]


def decode_attention(
    q: jax.Array,
    pages: Pages,
    lengths: jax.Array,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `paged.attention.DecodeAttention`."""
    num_rows, num_heads, head_dim = q.shape
    kv_heads = pages.kv_heads
    tables = meta.page_tables[meta.slots]
    queries = q.reshape(num_rows, kv_heads, num_heads // kv_heads, 1, head_dim)
    position = lengths[:, None] - 1

    def step(span: jax.Array, running: Running) -> Running:
        kv = _gather_span(pages, tables, span)
        return _attend(running, queries, kv, span, position, scoring)

    # Rows without a query see nothing, and must not make the others start from the beginning.
    shortest = jnp.min(jnp.where(lengths > 0, lengths, jnp.iinfo(jnp.int32).max))
    window = scoring.window
    first = 0 if window is None else jnp.maximum(shortest - window, 0) // SPAN
    last = -(-jnp.max(lengths) // SPAN)
    out = _finish(lax.fori_loop(first, last, step, _start(queries, pages, sinks)))
    return out.reshape(num_rows, num_heads, -1).astype(q.dtype)


def prefill_attention(
    q: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `paged.attention.PrefillAttention`."""
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = pages.kv_heads
    size = meta.tile_size
    # A chunk's last tile may reach past the flat tokens; the next tile overwrites what it spills.
    padded = jnp.pad(q, ((0, size), (0, 0), (0, 0)))

    def tile(n: jax.Array, out: jax.Array) -> jax.Array:
        row, start = meta.tile_row[n], meta.tile_start[n]
        begin = meta.query_start[row] + start
        queries = lax.dynamic_slice_in_dim(padded, begin, size)
        queries = queries.reshape(1, size, kv_heads, num_heads // kv_heads, head_dim)
        queries = queries.transpose(0, 2, 3, 1, 4)
        first_position = meta.context_len[row] + start
        seen = meta.context_len[row] + jnp.minimum(start + size, meta.query_len[row])
        position = jnp.minimum(first_position + jnp.arange(size, dtype=jnp.int32), seen - 1)[None]
        table = meta.page_tables[meta.slots[row]][None]

        def step(span: jax.Array, running: Running) -> Running:
            kv = _gather_span(pages, table, span)
            return _attend(running, queries, kv, span, position, scoring)

        window = scoring.window
        first = 0 if window is None else jnp.maximum(first_position - window + 1, 0) // SPAN
        running = _start(queries, pages, sinks)
        done = _finish(lax.fori_loop(first, -(-seen // SPAN), step, running))
        done = done.transpose(0, 3, 1, 2, 4).reshape(size, num_heads, -1)
        return lax.dynamic_update_slice_in_dim(out, done.astype(q.dtype), begin, axis=0)

    nothing = jnp.zeros((*padded.shape[:-1], pages.latent_rank or head_dim), q.dtype)
    return lax.fori_loop(0, meta.num_tiles, tile, nothing)[:num_tokens]


def _gather_span(pages: Pages, tables: jax.Array, span: jax.Array) -> Pages:
    """What each table [R, P] holds at SPAN positions from span * SPAN, heads ahead of positions.

    Whole pages are taken, and heads are brought ahead of positions here: XLA's CPU products over
    strided operands are several times slower than the copy. Page sizes divide SPAN.
    """
    per_span = SPAN // pages.values.shape[1]
    entry = jnp.minimum(span * per_span + jnp.arange(per_span), tables.shape[1] - 1)
    one_head = (1,) if pages.latent_rank is not None else ()

    def gather(stored: jax.Array) -> jax.Array:
        flat = stored.reshape(len(stored), -1)
        taken = jnp.take(flat, tables[:, entry], axis=0, mode="clip")
        return jnp.swapaxes(taken.reshape(-1, SPAN, *one_head, *stored.shape[2:]), 1, 2)

    return jax.tree.map(gather, pages)


def _start(queries: jax.Array, pages: Pages, sinks: jax.Array | None) -> Running:
    """Output, maximum and sum of a softmax over the sinks alone, for queries [R, Hkv, G, Q, D]."""
    *rows, head_dim = queries.shape
    out = jnp.zeros((*rows, pages.latent_rank or head_dim), jnp.float32)
    if sinks is None:
        return out, jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
    maximum = jnp.broadcast_to(sinks.reshape(*rows[1:3], 1), rows)
    return out, maximum, jnp.ones(rows, jnp.float32)


def _attend(
    running: Running,
    queries: jax.Array,
    kv: Pages,
    span: jax.Array,
    position: jax.Array,
    scoring: Scoring,
) -> Running:
    """Fold one span of keys and values into the running softmax.

    Args:
        queries: [R, Hkv, G, Q, D].
        kv: see `_gather_span`.
        position: [R, Q] int32 position of each query; a negative one sees nothing.
    """
    out, maximum, total = running
    k, v = _unpacked(kv)
    scores = jnp.einsum("rhgqd,rhsd->rhgqs", queries, k, preferred_element_type=jnp.float32)
    scores *= scoring.scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
    key_position = span * SPAN + jnp.arange(SPAN, dtype=jnp.int32)
    visible = key_position <= position[..., None]
    if scoring.window is not None:
        visible &= key_position > position[..., None] - scoring.window
    # A page holds what its last owner left beyond the row's end, and zero times NaN is NaN.
    v = jnp.where(visible.any(axis=1)[:, None, :, None], v, 0)
    visible = visible[:, None, None]
    scores = jnp.where(visible, scores, MASKED)
    new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - new_maximum[..., None]), 0.0)
    decay = jnp.exp(maximum - new_maximum)
    values = jnp.einsum(
        "rhgqs,rhsd->rhgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return (
        out * decay[..., None] + values,
        new_maximum,
        total * decay + weights.sum(axis=-1),
    )


def _unpacked(kv: Pages) -> tuple[jax.Array, jax.Array]:
    """Keys and values [R, Hkv, SPAN, D] for products, those of 8 bits in float32."""
    if kv.latent_rank is not None:
        return kv.values, kv.values[..., : kv.latent_rank]
    values = kv.values.view(kv.dtype)
    values = values.astype(jnp.float32) if kv.dtype.itemsize == 1 else values
    k, v = jnp.split(values, 2, axis=1)
    if kv.scales is None:
        return k, v
    scales = lax.bitcast_convert_type(kv.scales, jnp.bfloat16).astype(jnp.float32)
    return k * scales[..., :1], v * scales[..., 1:]


def _finish(running: Running) -> jax.Array:
    out, _, total = running
    return out / jnp.maximum(total, 1e-30)[..., None]
