"""How prefill kernels cut the tiles of a step into pieces, and share these out.

A piece is what a kernel takes at a time: the few tokens of a tile that make a good matrix together
with query heads of one key/value head. Programs take pieces in turns, and there are as many turns
as the step needs, so that padding a step for more rows or tiles costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged.attention.metadata import AttentionMetadata
from paged.kernels import Ref, divide


@dataclass(frozen=True)
class Cut:
    """How a tile is cut, the same for all tiles of a step.

    Attributes:
        group: query heads that share one key/value head (G).
        members: those of a piece, a power of two; what is beyond the group is padding. A larger
            group is shared out to several pieces.
        tokens: tokens of a piece.
        heads: pieces that cover all heads of the same tokens.
        parts: pieces that cover all tokens of a tile for the same heads.
    """

    group: int
    members: int
    tokens: int
    heads: int
    parts: int

    @classmethod
    def of(
        cls, group: int, kv_heads: int, tile_size: int, *, queries: int, max_members: int
    ) -> Cut:
        """Pieces of `queries` query rows (tokens times members)."""
        members = min(pl.next_power_of_2(group), max_members)
        tokens = min(queries // members, tile_size)
        heads = kv_heads * pl.cdiv(group, members)
        return cls(group, members, tokens, heads, parts=tile_size // tokens)

    @property
    def per_tile(self) -> int:
        return self.heads * self.parts


class Step(NamedTuple):
    """The shape of a step, gathered for kernels.

    Attributes:
        rows: [R, 4] int32, slot, first flat token, tokens, and earlier context of each row.
        tiles: [N, 2] int32, row and first token of each tile. A kernel may add columns of its own.
        num_tiles: [1] int32, tiles in use.
    """

    rows: Ref
    tiles: Ref
    num_tiles: Ref

    @classmethod
    def of(cls, meta: AttentionMetadata) -> Step:
        rows = [meta.slots, meta.query_start, meta.query_len, meta.context_len]
        tiles = [meta.tile_row, meta.tile_start]
        return cls(jnp.stack(rows, axis=1), jnp.stack(tiles, axis=1), meta.num_tiles[None])


class Piece(NamedTuple):
    """One piece. All are int32 scalars.

    Attributes:
        head: its key/value head.
        first_member: the first of its query heads, counted within the group.
        slot: the page table of its row.
        token: its first flat token.
        num_tokens: its tokens; not positive where the row's chunk ends before the piece.
        first, last: positions of its first and last token in the sequence.
    """

    head: jax.Array
    first_member: jax.Array
    slot: jax.Array
    token: jax.Array
    num_tokens: jax.Array
    first: jax.Array
    last: jax.Array


def in_turn(
    n: jax.Array, program: jax.Array, programs: int | jax.Array, num_pieces: jax.Array
) -> jax.Array:
    """The piece that a program takes in turn n; negative where there is none left.

    Last pieces first, for they have the longest context, and back and forth: programs that come
    off worse in one turn come off better in the next.
    """
    place = jnp.where(lax.rem(n, 2) == 0, program, programs - 1 - program)
    return num_pieces - 1 - (n * programs + place)


def locate(index: jax.Array, cut: Cut, step: Step) -> Piece:
    """Where a piece lies."""
    of_tokens, of_heads = divide(index, cut.heads)
    head, of_group = divide(of_heads, pl.cdiv(cut.group, cut.members))
    tile, part = divide(of_tokens, cut.parts)
    row, tile_start = step.tiles[tile, 0], step.tiles[tile, 1]
    slot, query_start, query_len, context_len = (step.rows[row, field] for field in range(4))
    begin = tile_start + part * cut.tokens
    count = jnp.minimum(query_len - begin, cut.tokens)
    first = context_len + begin
    return Piece(
        head=head,
        first_member=of_group * cut.members,
        slot=slot,
        token=query_start + begin,
        num_tokens=count,
        first=first,
        last=first + count - 1,
    )


class Stretch(NamedTuple):
    """Spans [since, until) that a piece sees either whole or in part."""

    since: jax.Array
    until: jax.Array
    whole: bool


def stretches(piece: Piece, window: int | None, span: int) -> list[Stretch]:
    """The spans of `span` positions that a piece has to visit, each stretch going on from the last.

    A stretch may be empty, with its end before its beginning.
    """
    outer = lax.div(piece.first + 1, span)
    end = lax.div(piece.last, span) + 1
    if window is None:
        return [Stretch(jnp.int32(0), outer, whole=True), Stretch(outer, end, whole=False)]
    begin = lax.div(jnp.maximum(piece.first - window + 1, 0), span)
    inner = pl.cdiv(jnp.maximum(piece.last - window + 1, 0), span)
    return [
        Stretch(begin, inner, whole=False),
        Stretch(inner, outer, whole=True),
        Stretch(jnp.maximum(inner, outer), end, whole=False),
    ]
