"""How prefill splits tiles, against its rules, for chunks of all lengths behind all contexts."""

from __future__ import annotations

import functools
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.attention import AttentionMetadata, Scoring, attention_metadata
from paged.attention.mosaic.rows import COMPUTERS, ROWS, Spec
from paged.attention.mosaic.splits import MOST_MERGES, MOST_PLACES, SplitStep, split_tiles, task_of
from paged.attention.pieces import Cut, stretches
from tests.paged.ragged import Row

NUM_ROWS, NUM_TOKENS, TILE = 6, 1024, 128
PROGRAMS, SPAN, LONGEST = 132, 128, 131_072
LEAST = 4  # spans of a split: any token of a tile sees some of so many positions


def spec_of(window: int | None = None) -> Spec:
    """Of heads as Llama-3.1-8B has them."""
    bfloat16 = jnp.dtype(jnp.bfloat16)
    return Spec(
        cut=Cut.of(4, 8, TILE, queries=COMPUTERS * ROWS, max_members=8),
        head_dim=128,
        kv_heads=8,
        page_size=16,
        pages_per_table=LONGEST // 16,
        span=SPAN,
        stages=2,
        lead=1,
        may_split=True,
        scoring=Scoring(1.0, window),
        dtype=bfloat16,
        out_dtype=bfloat16,
        page_dtype=bfloat16,
        interpreted=True,
    )


def metadata(rows: list[Row]) -> AttentionMetadata:
    padding = [0] * (NUM_ROWS - len(rows))
    return attention_metadata(
        jnp.zeros((NUM_ROWS, 8), jnp.int32),
        jnp.arange(NUM_ROWS, dtype=jnp.int32),
        jnp.array([row.query for row in rows] + padding, jnp.int32),
        jnp.array([row.context for row in rows] + padding, jnp.int32),
        num_tokens=NUM_TOKENS,
        page_size=16,
        tile_size=TILE,
        decode_only=False,
        backend="mosaic",
    )


class Pieces(NamedTuple):
    """Every piece in the list of tiles, arrays of int32 [pieces of all entries].

    Attributes:
        key: [.., 2] its first token and its head.
        tokens: not positive for none.
        whole: [.., 2] the spans that the piece is to visit, of which
        visits: [.., stretches, 2] are this split's.
        split, num_splits: see `Task`.
    """

    key: Any
    tokens: Any
    whole: Any
    visits: Any
    split: Any
    num_splits: Any


@functools.partial(jax.jit, static_argnames="window")
def split(meta: AttentionMetadata, window: int | None) -> tuple[SplitStep, Pieces]:
    spec = spec_of(window)
    splits = split_tiles(meta, spec, PROGRAMS)

    def of(index: jax.Array) -> Pieces:
        task = task_of(index, splits.step, spec)
        whole = stretches(task.piece, window, spec.span)
        return Pieces(
            jnp.stack([task.piece.token, task.piece.head]),
            task.piece.num_tokens,
            jnp.stack([whole[0].since, whole[-1].until]),
            jnp.stack([jnp.stack([each.since, each.until]) for each in task.visits]),
            task.split,
            task.num_splits,
        )

    return splits, jax.vmap(of)(jnp.arange(len(splits.step.tiles) * spec.cut.per_tile))


def in_use(rows: list[Row], window: int | None) -> tuple[SplitStep, Pieces]:
    """The splits of a step, and the pieces that have tokens."""
    splits, pieces = jax.tree.map(np.asarray, split(metadata(rows), window))
    used = np.arange(len(pieces.tokens)) < splits.step.num_tiles[0] * spec_of().cut.per_tile
    return splits, Pieces(*(each[used & (pieces.tokens > 0)] for each in pieces))


ROW = st.tuples(st.integers(0, LONGEST - 200), st.integers(0, NUM_TOKENS // NUM_ROWS))


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=NUM_ROWS), st.sampled_from([None, 100, 5000]))
def test_splits_cover_what_each_piece_visits(
    drawn: list[tuple[int, int]], window: int | None
) -> None:
    rows = [Row(*each) for each in drawn]
    _, pieces = in_use(rows, window)
    seen: dict[tuple[int, ...], list[int]] = {}
    for n, key in enumerate(pieces.key):
        seen.setdefault(tuple(key), []).append(n)
    tokens_of_a_piece = spec_of().cut.tokens
    chunks = (row.query for row in rows if row.query > 1)
    assert len(seen) == 8 * sum(-(-chunk // tokens_of_a_piece) for chunk in chunks)
    for own in seen.values():
        assert pieces.split[own].tolist() == list(range(pieces.num_splits[own[0]]))
        begin, end = pieces.whole[own[0]]
        for n in own:
            since = begin
            for stretch in pieces.visits[n]:
                if stretch[0] < stretch[1]:
                    assert stretch[0] == begin
                    begin = stretch[1]
            assert len(own) == 1 or begin - since >= LEAST
        assert begin == end


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=NUM_ROWS))
def test_results_of_splits_have_places_of_their_own_where_they_are_merged(
    drawn: list[tuple[int, int]],
) -> None:
    splits, _ = in_use([Row(*each) for each in drawn], None)
    tiles = splits.step.tiles[: splits.step.num_tiles[0]]
    places = tiles[tiles[:, 3] > 1, 4]
    assert places.tolist() == list(range(len(places)))
    assert len(places) <= MOST_PLACES
    firsts = np.flatnonzero((tiles[:, 3] > 1) & (tiles[:, 2] == 0))
    merges = [[first, *tiles[first, 3:]] for first in firsts]
    assert len(merges) <= MOST_MERGES
    assert splits.merges[: len(merges)].tolist() == merges
    assert splits.num_merges == len(merges)


def spans_of_the_busiest(pieces: Pieces) -> int:
    """When programs are done that take the pieces, last first, as they come off others."""
    spans = (pieces.visits[:, :, 1] - pieces.visits[:, :, 0]).clip(0).sum(axis=1)
    busy = [0] * PROGRAMS
    for length in spans[::-1]:
        heapq.heappushpop(busy, busy[0] + int(length))
    return max(busy)


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        ([Row(30_000, 16)], 1.1),
        ([Row(30_000, 64)], 1.1),
        ([Row(30_000, 64), Row(0, 300), Row(0, 300)], 1.2),
        ([Row(15_000, 640)], 1.2),
        ([Row(100_000, 700), Row(2_000, 200)], 1.2),
        ([Row(4_000, 64), Row(0, 100)], 1.5),
    ],
    ids=str,
)
def test_all_programs_have_about_as_much_to_do(rows: list[Row], most: float) -> None:
    _, pieces = in_use(rows, None)
    work = (pieces.visits[:, :, 1] - pieces.visits[:, :, 0]).clip(0).sum()
    assert spans_of_the_busiest(pieces) <= most * work / PROGRAMS + 2


@pytest.mark.parametrize("rows", [[], [Row(0, 1024)], [Row(0, 300), Row(200, 300)], [Row(90, 1)]])
def test_short_contexts_are_not_split(rows: list[Row]) -> None:
    splits, _ = in_use(rows, None)
    assert (splits.step.tiles[: splits.step.num_tiles[0], 3] == 1).all()
    assert splits.num_merges == 0
