"""How prefill splits long contexts, where a step has fewer pieces than a GPU has multiprocessors.

A piece reads its context from one end to the other. A few tokens behind a long context are few
pieces, each of them long: a chunk of 64 tokens of a model with 8 key/value heads keeps 16
multiprocessors busy, and its step takes as long as one of 512. So a tile is listed several times,
each time for another split of its context. Of these each piece gives an average over the values of
its positions, which a second kernel merges by the sums of their weights ("Flash-Decoding" does so
for single tokens, https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.attention.metadata import AttentionMetadata, first_beyond
from paged.attention.mosaic.rows import (
    COMPUTERS,
    ROWS,
    Running,
    Spec,
    half_of,
    store_output,
    wide,
)
from paged.attention.mosaic.words import ROW
from paged.attention.pieces import Piece, Step, Stretch, locate, stretches
from paged.attention.scoring import LOWEST, MASKED
from paged.kernels import Ref, divide

MOST_PLACES = 32
"""Splits of all tiles of a step, beside tiles that are not split: results have so many places."""

MOST_MERGES = MOST_PLACES // 2
"""Tiles that are split at most: each takes two places."""

# With fewer spans a split could have positions that none of its tokens sees.
_LEAST_SPANS = 6
# What a piece costs beside its spans, in spans: its queries come, and its result goes.
_OVERHEAD = 2
# Elements of a head that a program merges, and splits that it reads at a time: as many as there are
# registers for.
_MERGED, _AT_ONCE = 64, 4
# Steps with room for more pieces than this for each program are not split: whatever is left to the
# last turn is little.
_MOST_TURNS = 4


class Splits(NamedTuple):
    """A step whose tiles are split.

    Attributes:
        step: `tiles` [N + MOST_PLACES, 5] int32 has, beside row and first token of each tile, the
            number of the split, how many there are of this tile, and the place of the result.
        merges: [MOST_MERGES, 3] int32, for each tile that is split its first entry in `tiles`, how
            many splits it has (0 for none), and the place of the first.
    """

    step: Step
    merges: jax.Array


class Task(NamedTuple):
    """A piece, or a split of it.

    Attributes:
        visits: the spans to visit.
        split, splits: its number, and how many the piece has. One split is no split.
        place, within: of the result: the tile's, and the piece's within the tile.
    """

    piece: Piece
    visits: list[Stretch]
    split: jax.Array
    splits: jax.Array
    place: jax.Array
    within: jax.Array

    @property
    def spans(self) -> tuple[jax.Array, jax.Array]:
        """The first to visit, and the one behind the last."""
        return self.visits[0].since, self.visits[-1].until

    @property
    def num_spans(self) -> jax.Array:
        since, until = self.spans
        return until - since


def worth_splitting(num_pieces: int, programs: int) -> bool:
    """Whether a step could need splitting that has so many pieces if it is a single chunk."""
    return num_pieces < _MOST_TURNS * programs


def split_tiles(meta: AttentionMetadata, spec: Spec, programs: int) -> Splits:
    """Split the tiles of a step so that so many programs at a time are done as soon as can be."""
    step = Step.of(meta)
    pieces, spans = _sizes(meta, spec)
    splits = _fastest(pieces, spans, programs)
    end, is_split = jnp.cumsum(splits), splits > 1
    places = jnp.where(is_split, splits, 0)
    place = jnp.cumsum(places) - places

    entry = jnp.arange(len(splits) + MOST_PLACES, dtype=jnp.int32)
    tile = jnp.minimum(first_beyond(end, entry), len(splits) - 1)
    split = entry - (end - splits)[tile]
    tiles = [step.tiles[tile, 0], step.tiles[tile, 1], split, splits[tile], place[tile] + split]

    merge = jnp.arange(MOST_MERGES)
    num_split = jnp.cumsum(is_split)
    tile = jnp.minimum(first_beyond(num_split, merge), len(splits) - 1)
    merges = [
        (end - splits)[tile],
        jnp.where(merge < num_split[-1], splits[tile], 0),
        place[tile],
    ]
    listed = jnp.stack(tiles, axis=1).astype(jnp.int32)
    return Splits(
        Step(step.rows, listed, end[-1:].astype(jnp.int32)),
        jnp.stack(merges, axis=1).astype(jnp.int32),
    )


def _sizes(meta: AttentionMetadata, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Pieces of each tile that have tokens, and the spans that the longest of them visits, [N]."""
    row, window = meta.tile_row, spec.scoring.window
    tokens = jnp.minimum(meta.query_len[row] - meta.tile_start, meta.tile_size)
    first = meta.context_len[row] + meta.tile_start
    begin = 0 if window is None else jnp.maximum(first - window + 1, 0) // spec.span
    spans = (first + tokens - 1) // spec.span + 1 - begin
    pieces = pl.cdiv(tokens, spec.cut.tokens) * spec.cut.heads
    in_use = jnp.arange(len(row)) < meta.num_tiles
    return jnp.where(in_use, pieces, 0), jnp.where(in_use, spans, 0)


def _fastest(pieces: jax.Array, spans: jax.Array, programs: int) -> jax.Array:
    """How often to split each tile [N]; 0 for those without pieces.

    Weighs splits of the longest tile into 1, 2, ... and of the others into as long ones. Taken for
    the time are the longest program's spans, of which two bounds are known: as many turns as there
    are pieces for a program, each as long as the longest; and, for each takes the next piece as
    soon as it is done with one, an equal share of everything and the longest piece.
    """
    ways = jnp.arange(1, MOST_PLACES + 1)[:, None]
    length = pl.cdiv(jnp.max(spans), ways)
    most = jnp.maximum(spans // _LEAST_SPANS, 1)
    splits = jnp.clip(pl.cdiv(spans, jnp.maximum(length, 1)), 1, most)
    longest = jnp.max(pl.cdiv(spans, splits), axis=1) + _OVERHEAD
    count = jnp.sum(splits * pieces, axis=1)
    work = jnp.sum(pieces * spans) + _OVERHEAD * count
    in_turns = pl.cdiv(count, programs) * longest
    seconds = jnp.minimum(in_turns, work / programs + longest)
    places = jnp.sum(jnp.where(splits > 1, splits, 0), axis=1)
    best = jnp.argmin(jnp.where(places <= MOST_PLACES, seconds, jnp.inf))
    return jnp.where(pieces > 0, splits[best], 0)


def task_of(index: jax.Array, step: Step, spec: Spec) -> Task:
    """What a program does of a piece."""
    piece = locate(index, spec.cut, step)
    visits = stretches(piece, spec.scoring.window, spec.span)
    tile, within = divide(index, spec.cut.per_tile)
    if not spec.splits:
        zero, one = jnp.int32(0), jnp.int32(1)
        return Task(piece, visits, zero, one, zero, within)
    split, splits, place = (step.tiles[tile, field] for field in (2, 3, 4))
    since, until = visits[0].since, visits[-1].until
    begin, end = (since + (until - since) * n // splits for n in (split, split + 1))
    visits = [
        Stretch(jnp.clip(each.since, begin, end), jnp.clip(each.until, begin, end), each.whole)
        for each in visits
    ]
    return Task(piece, visits, split, splits, place, within)


def result_shapes(spec: Spec) -> list[jax.ShapeDtypeStruct]:
    """What splits come to.

    Averages over the values of their positions [MOST_PLACES, pieces of a tile, rows of a piece, D],
    and the base-2 logarithms of the sums of their weights, without the last axis; float32.
    """
    shape = MOST_PLACES, spec.cut.per_tile, COMPUTERS * ROWS
    return [
        jax.ShapeDtypeStruct((*shape, spec.head_dim), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]


def merged(
    out: jax.Array,
    results: Sequence[jax.Array],
    splits: Splits,
    spec: Spec,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """The output [T, Hq, D], with that of the pieces that were split.

    `results` are of `result_shapes`.
    """
    out_ref = jax.new_ref(out)
    plgpu.kernel(
        functools.partial(_merge_kernel, spec=spec),
        kernel_name="paged_prefill_merge",
        grid=(MOST_MERGES, spec.cut.per_tile, spec.head_dim // _MERGED),
        grid_names=("merge", "within", "chunk"),
        num_threads=COMPUTERS,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((COMPUTERS, ROWS, _MERGED), spec.out_dtype)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*results, splits.step, splits.merges, out_ref)
    return jax.freeze(out_ref)


def _merge_kernel(
    averages_ref: Ref,
    log_sums_ref: Ref,
    step: Step,
    merges_ref: Ref,
    out_ref: Ref,
    rows: Ref,
    *,
    spec: Spec,
) -> None:
    """Average the splits of a piece by their sums, for some elements of its heads."""
    merge, within, chunk = (lax.axis_index(name) for name in ("merge", "within", "chunk"))
    warpgroup = lax.axis_index("warpgroup")
    entry, splits, place = (merges_ref[merge, field] for field in range(3))
    elements, shape = pl.ds(chunk * _MERGED, _MERGED), (ROWS, _MERGED)
    own = pl.ds(warpgroup * ROWS, ROWS)

    def fold(n: jax.Array, running: Running) -> Running:
        out, maximum, total = running
        index = [n * _AT_ONCE + k for k in range(_AT_ONCE)]
        places = [place + jnp.minimum(k, splits - 1) for k in index]
        sums = [
            plgpu.load(log_sums_ref.at[each, within, own], layout=ROW, optimized=False)
            for each in places
        ]
        parts = [
            plgpu.load(
                averages_ref.at[each, within, own, elements],
                layout=plgpu.Layout.WGMMA,
                optimized=False,
            )
            for each in places
        ]
        sums = [jnp.where(k < splits, s, MASKED) for k, s in zip(index, sums, strict=True)]
        new_maximum = functools.reduce(jnp.maximum, sums, maximum)
        decay = jnp.exp2(maximum - new_maximum)
        weights = [jnp.exp2(s - new_maximum) for s in sums]
        out *= wide(decay, shape)
        for weight, part in zip(weights, parts, strict=True):
            out += part * wide(weight, shape)
        return out, new_maximum, sum(weights, total * decay)

    half = half_of(locate(entry * spec.cut.per_tile + within, spec.cut, step), warpgroup, spec)

    @pl.when((splits > 0) & (half.num_tokens > 0))
    def _() -> None:
        running = (
            plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full(ROWS, LOWEST, jnp.float32), ROW),
            plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), ROW),
        )
        out, _, total = lax.fori_loop(0, pl.cdiv(splits, _AT_ONCE), fold, running)
        out = (out / wide(total, shape)).astype(spec.out_dtype)
        store_output(out, rows.at[warpgroup], out_ref, half, spec, elements)
