"""What attention needs to know of a step, worked out once and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from paged.attention.tiling import BY_RULE, Tilings
from paged.cache import DROPPED


@struct.dataclass
class AttentionMetadata:
    """The shape of a ragged batch, on the device.

    Attributes:
        page_tables: [S, P] int32 page ids of every slot, padded with the null page.
        slots: [R] int32, the page table of each row.
        query_start: [R] int32, first flat token of the row.
        query_len: [R] int32 tokens of the row in this step; 0 for padding rows.
        context_len: [R] int32 tokens of its sequence in pages before this step.
        positions: [T] int32 position of each token in its sequence; 0 for padding.
        write_index: [T] int32 `page * page_size + offset` of each token's key and value; out of
            range for padding tokens. No two are equal.
        tile_row, tile_start: [N] int32; tile n covers the tokens `tile_start[n]` to
            `tile_start[n] + tile_size` of row `tile_row[n]`'s chunk, as far as the chunk goes.
            Only rows longer than one token have tiles. Tiles are in the order of their tokens.
        num_tiles: [] int32, tiles in use.
        tile_size: tokens a tile holds (static).
        decode_only: every row has one token and T == R: token r is row r (static).
        backend: name in `paged.attention.BACKENDS` (static).
        tilings: what was measured of its kernels (static).
        other_groups: page tables and write indices of the further groups of layers. What a layer
            is given is that of its own group alone.
    """

    page_tables: jax.Array
    slots: jax.Array
    query_start: jax.Array
    query_len: jax.Array
    context_len: jax.Array
    positions: jax.Array
    write_index: jax.Array
    tile_row: jax.Array
    tile_start: jax.Array
    num_tiles: jax.Array
    tile_size: int = struct.field(pytree_node=False)
    decode_only: bool = struct.field(pytree_node=False)
    backend: str = struct.field(pytree_node=False)
    tilings: Tilings = struct.field(pytree_node=False, default=BY_RULE)
    other_groups: tuple[tuple[jax.Array, jax.Array], ...] = ()

    def of_groups(self) -> list[AttentionMetadata]:
        """The same step for the layers of each group."""
        pairs = (self.page_tables, self.write_index), *self.other_groups
        return [
            replace(self, page_tables=tables, write_index=index, other_groups=())
            for tables, index in pairs
        ]


def attention_metadata(
    page_tables: jax.Array,
    slots: jax.Array,
    query_len: jax.Array,
    context_len: jax.Array,
    *,
    num_tokens: int,
    page_size: int,
    tile_size: int,
    decode_only: bool,
    backend: str,
    tilings: Tilings = BY_RULE,
    other_tables: Sequence[jax.Array] = (),
) -> AttentionMetadata:
    """Derive the metadata of a step from its rows (see `AttentionMetadata` for shapes).

    Tokens of a row are contiguous and rows follow each other, so the rest follows from the lengths.
    Padding rows stand last. `other_tables` are those of further groups of layers.
    """
    num_rows = slots.shape[0]
    query_end = jnp.cumsum(query_len)
    query_start = query_end - query_len
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.minimum(first_beyond(query_end, token), num_rows - 1)
    is_token = token < query_end[-1]
    positions = jnp.where(is_token, context_len[row] + token - query_start[row], 0)

    def write_index(tables: jax.Array) -> jax.Array:
        page = tables[slots[row], positions // page_size]
        place = jnp.where(is_token, page * page_size + positions % page_size, DROPPED + token)
        return place.astype(jnp.int32)

    tiles = jnp.where(query_len > 1, -(-query_len // tile_size), 0)
    tile_end = jnp.cumsum(tiles)
    tile = jnp.arange(num_tokens // tile_size + num_rows, dtype=jnp.int32)
    tile_row = jnp.minimum(first_beyond(tile_end, tile), num_rows - 1)
    tile_start = (tile - (tile_end - tiles)[tile_row]) * tile_size
    return AttentionMetadata(
        page_tables=page_tables,
        slots=slots,
        query_start=jnp.minimum(query_start, num_tokens - 1).astype(jnp.int32),
        query_len=query_len,
        context_len=context_len,
        positions=positions.astype(jnp.int32),
        write_index=write_index(page_tables),
        tile_row=tile_row.astype(jnp.int32),
        tile_start=tile_start.astype(jnp.int32),
        num_tiles=tile_end[-1].astype(jnp.int32),
        tile_size=tile_size,
        decode_only=decode_only,
        backend=backend,
        tilings=tilings,
        other_groups=tuple((tables, write_index(tables)) for tables in other_tables),
    )


def first_beyond(ends: jax.Array, values: jax.Array) -> jax.Array:
    """For each of `values`, the index of the first of the rising `ends` that is greater.

    Compares all with all: the binary search would be a loop, whose every turn a GPU must report
    back to the host.
    """
    return jnp.searchsorted(ends, values, side="right", method="compare_all")
