"""Long contexts of prefill, split where a step has fewer pieces than a GPU has multiprocessors.

A program takes one piece at a time, and reads its context from one end to the other. A few tokens
behind a long context are few pieces, each of them long: a chunk of 64 tokens of a model with 32
query heads and 8 key/value heads is 16 pieces, which leave 116 of an H200's 132 multiprocessors
idle, and its step takes as long as one of 512. So contexts are cut, too:

- `split_tiles` lists a tile several times, each time for another part of its context, a split. How
  many are worth their cost is found in the program itself: a step is compiled for all lengths.
- `task_of` says which spans of its context a piece of such a tile visits. What these alone come
  to, an average over values and the sum of the weights in it, goes to a place of its own; pieces
  that are not split give output at once.
- `merged`, a second kernel, averages the splits of each piece by those sums.

"Flash-Decoding" does so for single tokens, https://pytorch.org/blog/flash-decoding/.
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
from paged.attention.mosaic.spans import folded
from paged.attention.mosaic.words import ROW
from paged.attention.pieces import Piece, Step, Stretch, locate, stretches
from paged.attention.scoring import LOWEST, MASKED
from paged.kernels import Ref, divide

MOST_PLACES = 32
"""Splits in a step at most: results have so many places. Tiles that are not split need none."""

MOST_MERGES = MOST_PLACES // 2
"""Tiles that are split at most: each takes at least two places."""

# Spans of a tile for each of its splits at least: with fewer, of 64 positions, a token could see
# nothing of a split.
_LEAST_SPANS = 6
# What a piece costs beside its spans, in spans: its queries come, and its result goes. That of a
# split goes in float32 and is read once more.
_OVERHEAD, _OVERHEAD_OF_SPLIT = 2, 5
# Elements of a head that a program merges, and splits that it reads at a time: as many as there are
# registers for.
_MERGED, _AT_ONCE = 64, 4
# With so many pieces for each program nothing is split: what the last turn wastes is little then.
_MANY = 2


class SplitStep(NamedTuple):
    """A step whose tiles are split.

    Attributes:
        step: `tiles` [N + MOST_PLACES, 5] int32 has, beside row and first token of each tile, the
            number of the split, how many there are of this tile, and the place of the result.
        merges: [MOST_MERGES, 3] int32, for each tile that is split its first entry in `tiles`, how
            many splits it has, and the place of the first.
        num_merges: [1] int32, tiles that are split.
    """

    step: Step
    merges: jax.Array
    num_merges: jax.Array


class Task(NamedTuple):
    """A piece, or a split of it: what a program does at a time. Numbers are int32 scalars.

    Attributes:
        number: what `task_of` finds it by.
        piece: see there.
        visits: the spans to visit.
        split, num_splits: which of the piece's splits it is, and of how many. A single one is the
            whole piece.
        place: where its result goes if it is not: the first two indices into `result_shapes`.
    """

    number: jax.Array
    piece: Piece
    visits: list[Stretch]
    split: jax.Array
    num_splits: jax.Array
    place: tuple[jax.Array, jax.Array]

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
    return num_pieces < _MANY * programs


def split_tiles(meta: AttentionMetadata, spec: Spec, programs: int) -> SplitStep:
    """Split the tiles of a step so that so many programs at a time are done as soon as can be."""
    step = Step.of(meta)
    pieces, spans = _sizes(meta, spec)
    counts = _fastest(pieces, spans, programs)
    end, is_split = jnp.cumsum(counts), counts > 1
    places = jnp.where(is_split, counts, 0)
    place = jnp.cumsum(places) - places

    entry = jnp.arange(len(counts) + MOST_PLACES, dtype=jnp.int32)
    tile = jnp.minimum(first_beyond(end, entry), len(counts) - 1)
    split = entry - (end - counts)[tile]
    tiles = [step.tiles[tile, 0], step.tiles[tile, 1], split, counts[tile], place[tile] + split]

    merge = jnp.arange(MOST_MERGES)
    num_split = jnp.cumsum(is_split)
    tile = jnp.minimum(first_beyond(num_split, merge), len(counts) - 1)
    merges = [(end - counts)[tile], counts[tile], place[tile]]
    listed = jnp.stack(tiles, axis=1).astype(jnp.int32)
    return SplitStep(
        Step(step.rows, listed, end[-1:].astype(jnp.int32)),
        jnp.stack(merges, axis=1).astype(jnp.int32),
        num_split[-1:].astype(jnp.int32),
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
    """Into how many splits each tile goes for the step to be done first, [N]; 0 without pieces.

    Tries 1, 2, ... splits of the longest tile, and splits as long as these of the others. When the
    last program is done, in spans, has two bounds: as many turns as there are pieces for a program,
    each as long as the longest; and, since programs take the next piece as soon as they are done
    with one, an equal share of everything and the longest piece.
    """
    ways = jnp.arange(1, MOST_PLACES + 1)[:, None]
    length = pl.cdiv(jnp.max(spans), ways)
    most = jnp.maximum(spans // _LEAST_SPANS, 1)
    splits = jnp.clip(pl.cdiv(spans, jnp.maximum(length, 1)), 1, most)
    overhead = jnp.where(splits > 1, _OVERHEAD_OF_SPLIT, _OVERHEAD)
    longest = jnp.max(pl.cdiv(spans, splits) + overhead, axis=1)
    work = jnp.sum(pieces * (spans + splits * overhead), axis=1)
    in_turns = pl.cdiv(jnp.sum(splits * pieces, axis=1), programs) * longest
    done = jnp.minimum(in_turns, work / programs + longest)
    places = jnp.sum(jnp.where(splits > 1, splits, 0), axis=1)
    best = jnp.argmin(jnp.where(places <= MOST_PLACES, done, jnp.inf))
    return jnp.where(pieces > 0, splits[best], 0)


def task_of(number: jax.Array, step: Step, spec: Spec) -> Task:
    """What there is to do of a piece, by its number in the tiles of a step."""
    piece = locate(number, spec.cut, step)
    visits = stretches(piece, spec.scoring.window, spec.span)
    tile, within = divide(number, spec.cut.per_tile)
    if not spec.may_split:
        zero, one = jnp.int32(0), jnp.int32(1)
        return Task(number, piece, visits, zero, one, (zero, within))
    split, num_splits, place = (step.tiles[tile, field] for field in (2, 3, 4))
    since, until = visits[0].since, visits[-1].until
    begin, end = (since + (until - since) * n // num_splits for n in (split, split + 1))
    visits = [
        Stretch(jnp.clip(each.since, begin, end), jnp.clip(each.until, begin, end), each.whole)
        for each in visits
    ]
    return Task(number, piece, visits, split, num_splits, (place, within))


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
    split: SplitStep,
    spec: Spec,
    programs: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """The output [T, Hq, D], with that of the pieces that were split.

    `results` are of `result_shapes`.
    """
    out_ref = jax.new_ref(out)
    plgpu.kernel(
        functools.partial(_merge_kernel, spec=spec),
        kernel_name="paged_prefill_merge",
        grid=(programs,),
        grid_names=("program",),
        num_threads=COMPUTERS,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((COMPUTERS, ROWS, _MERGED), spec.out_dtype)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*results, *split, out_ref)
    return jax.freeze(out_ref)


def _merge_kernel(
    averages_ref: Ref,
    log_sums_ref: Ref,
    step: Step,
    merges_ref: Ref,
    num_merges_ref: Ref,
    out_ref: Ref,
    rows: Ref,
    *,
    spec: Spec,
) -> None:
    """Average the splits of pieces. A program's turn is some elements of the head of one piece."""
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    chunks = spec.head_dim // _MERGED
    count = num_merges_ref[0] * spec.cut.per_tile * chunks

    def turn(n: jax.Array, carry: jax.Array) -> jax.Array:
        index, chunk = divide(program + n * programs, chunks)
        merge, within = divide(index, spec.cut.per_tile)
        entry, num_splits, place = (merges_ref[merge, field] for field in range(3))
        piece = locate(entry * spec.cut.per_tile + within, spec.cut, step)
        warpgroup = lax.axis_index("warpgroup")
        half = half_of(piece, warpgroup, spec)
        elements, own = pl.ds(chunk * _MERGED, _MERGED), pl.ds(warpgroup * ROWS, ROWS)
        parts = averages_ref.at[:, within, own, elements], log_sums_ref.at[:, within, own]

        @pl.when(half.num_tokens > 0)
        def _() -> None:
            out = _average(*parts, place, num_splits).astype(spec.out_dtype)
            store_output(out, rows.at[warpgroup], out_ref, half, spec, elements)

        return carry

    lax.fori_loop(0, pl.cdiv(jnp.maximum(count - program, 0), programs), turn, jnp.int32(0))


def _average(
    averages_ref: Ref, log_sums_ref: Ref, place: jax.Array, splits: jax.Array
) -> jax.Array:
    """[ROWS, _MERGED] of `averages` [MOST_PLACES, ROWS, _MERGED], so many from `place` on."""
    shape = (ROWS, _MERGED)

    def fold(n: jax.Array, running: Running) -> Running:
        index = [n * _AT_ONCE + k for k in range(_AT_ONCE)]
        places = [place + jnp.minimum(k, splits - 1) for k in index]
        load = functools.partial(plgpu.load, optimized=False)
        sums = [load(log_sums_ref.at[each], layout=ROW) for each in places]
        parts = [load(averages_ref.at[each], layout=plgpu.Layout.WGMMA) for each in places]
        sums = [jnp.where(k < splits, s, MASKED) for k, s in zip(index, sums, strict=True)]
        return folded(running, parts, sums, wide)

    running = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full(ROWS, LOWEST, jnp.float32), ROW),
        plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), ROW),
    )
    out, _, total = lax.fori_loop(0, pl.cdiv(splits, _AT_ONCE), fold, running)
    return out / wide(total, shape)
