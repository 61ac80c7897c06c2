"""The padded shapes that texts are computed in: so many rows of so many places."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

# Up to 512 places a text fills two thirds of its row or more; from there on lengths rise by a half
# and a third in turn.
_LENGTHS = (16, 32, 64, 128, 192, 256, 384, 512)
_MULTIPLE = 16
# Few programs: a batch that does not fill its rows takes shorter texts along.
_ROWS_FACTOR = 4


class Shape(NamedTuple):
    """What one program is compiled for."""

    rows: int
    length: int


@dataclass(frozen=True)
class Grid:
    """All shapes of an engine.

    Attributes:
        lengths: ascending; the last holds the longest text.
        rows: for each length, numbers of rows, ascending.
    """

    lengths: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def make(cls, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> Grid:
        """Shapes of as many tokens as a step may have, except that one text always fits."""
        lengths = _rungs(-(-max_model_len // _MULTIPLE) * _MULTIPLE)
        most = [min(max_num_seqs, max_num_batched_tokens // length) for length in lengths]
        return cls(lengths, tuple(_row_counts(max(rows, 1)) for rows in most))

    def all(self) -> list[Shape]:
        """Every shape, the largest first (they compile longest)."""
        pairs = zip(self.lengths, self.rows, strict=True)
        shapes = [Shape(rows, length) for length, counts in pairs for rows in counts]
        return sorted(shapes, key=lambda shape: shape.rows * shape.length, reverse=True)

    def length_for(self, num_tokens: int) -> int:
        """The shortest row that holds a text."""
        return self.lengths[bisect_left(self.lengths, num_tokens)]

    def most_rows(self, length: int) -> int:
        return self._rows_of(length)[-1]

    def rows_for(self, length: int, num_texts: int) -> int:
        """The fewest rows of a length that hold so many texts."""
        counts = self._rows_of(length)
        return counts[bisect_left(counts, num_texts)]

    def _rows_of(self, length: int) -> tuple[int, ...]:
        return self.rows[self.lengths.index(length)]


def _rungs(longest: int) -> tuple[int, ...]:
    lengths = list(_LENGTHS)
    while lengths[-1] < longest:
        lengths += [lengths[-1] * 3 // 2, lengths[-1] * 2]
    return (*(length for length in lengths if length < longest), longest)


def _row_counts(most: int) -> tuple[int, ...]:
    counts = [1]
    while counts[-1] * _ROWS_FACTOR < most:
        counts.append(counts[-1] * _ROWS_FACTOR)
    return tuple(dict.fromkeys((*counts, most)))
