"""What is derived of a step: places of tokens and tiles of chunks."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.attention import BACKENDS, AttentionMetadata, attention_metadata, default_backend
from paged.cache import DROPPED
from tests.paged.ragged import Row

NUM_ROWS, NUM_TOKENS, PAGE_SIZE, TILE = 6, 64, 8, 16
PAGES_PER_TABLE = 12

rows_of_a_step = st.lists(
    st.builds(Row, context=st.integers(0, 30), query=st.integers(1, 40)), max_size=NUM_ROWS
).filter(lambda rows: sum(row.query for row in rows) <= NUM_TOKENS)


@jax.jit
def derive(
    tables: jax.Array, slots: jax.Array, query_len: jax.Array, context_len: jax.Array
) -> AttentionMetadata:
    return attention_metadata(
        tables,
        slots,
        query_len,
        context_len,
        num_tokens=NUM_TOKENS,
        page_size=PAGE_SIZE,
        tile_size=TILE,
        decode_only=False,
        backend="xla",
    )


def metadata(rows: list[Row]) -> AttentionMetadata:
    """The metadata of `rows`, row r in slot r + 1 with the pages 100 r + 1 and following."""
    padding = [0] * (NUM_ROWS - len(rows))
    tables = 100 * np.arange(-1, NUM_ROWS)[:, None] + np.arange(1, PAGES_PER_TABLE + 1)
    return derive(
        jnp.asarray(tables, jnp.int32),
        jnp.arange(1, NUM_ROWS + 1, dtype=jnp.int32),
        jnp.asarray([row.query for row in rows] + padding, jnp.int32),
        jnp.asarray([row.context for row in rows] + padding, jnp.int32),
    )


@settings(deadline=None)
@given(rows_of_a_step)
def test_tokens_are_written_where_their_positions_lie(rows: list[Row]) -> None:
    meta = metadata(rows)
    positions, places = [], []
    for r, row in enumerate(rows):
        for position in range(row.context, row.context + row.query):
            positions.append(position)
            page = 100 * r + 1 + position // PAGE_SIZE
            places.append(page * PAGE_SIZE + position % PAGE_SIZE)
    tokens = len(positions)
    assert meta.positions.tolist() == positions + [0] * (NUM_TOKENS - tokens)
    assert meta.write_index[:tokens].tolist() == places


@settings(deadline=None)
@given(rows_of_a_step)
def test_padding_tokens_are_dropped_and_no_two_places_are_equal(rows: list[Row]) -> None:
    write_index = np.asarray(metadata(rows).write_index)
    tokens = sum(row.query for row in rows)
    assert (write_index[tokens:] >= DROPPED).all()
    assert len(set(write_index.tolist())) == NUM_TOKENS


@settings(deadline=None)
@given(rows_of_a_step)
def test_tiles_cover_each_chunk_once_and_in_order(rows: list[Row]) -> None:
    meta = metadata(rows)
    expected = [
        (r, start)
        for r, row in enumerate(rows)
        if row.query > 1
        for start in range(0, row.query, TILE)
    ]
    count = int(meta.num_tiles)
    assert count == len(expected) <= len(meta.tile_row)
    tiles = zip(meta.tile_row.tolist(), meta.tile_start.tolist(), strict=True)
    assert list(tiles)[:count] == expected


def test_row_starts_stay_inside_the_step() -> None:
    full = metadata([Row(0, NUM_TOKENS)])
    assert int(full.query_start.max()) < NUM_TOKENS


@pytest.mark.parametrize(
    ("platform", "capability", "backend"),
    [
        ("cpu", None, "xla"),
        ("gpu", "7.5", "xla"),
        ("gpu", "8.0", "triton"),
        ("gpu", "9.0", "mosaic"),
        ("gpu", "10.0", "triton"),
    ],
)
def test_each_device_gets_its_fastest_backend(
    platform: str, capability: str | None, backend: str
) -> None:
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert default_backend(device) == backend
    assert backend in BACKENDS
