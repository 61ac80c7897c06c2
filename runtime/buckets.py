"""The padded shapes that steps are compiled for. Warm-up, packing and benchmarks all ask here."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from paged.runtime.plan import StepPlan


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of one compiled step.

    Attributes:
        num_tokens: flat tokens T.
        num_rows: rows R, at most T.
        decode_only: every row has one token (T == R).
    """

    num_tokens: int
    num_rows: int
    decode_only: bool


@dataclass(frozen=True)
class Buckets:
    """All shapes of an engine.

    Attributes:
        decode: row counts of decode steps, ascending; the last is max_num_seqs.
        mixed: token counts of steps with chunks, ascending; the last is max_num_batched_tokens.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def make(cls, max_num_seqs: int, max_num_batched_tokens: int) -> Buckets:
        """Few programs, little padding: at most a third of a large step is padding."""
        return cls(
            _sizes(1, max_num_seqs, dense_from=64),
            _sizes(16, max_num_batched_tokens, dense_from=1024),
        )

    @property
    def max_num_seqs(self) -> int:
        return self.decode[-1]

    def all(self) -> tuple[Bucket, ...]:
        """Every shape, the largest first (they compile longest)."""
        decode = (Bucket(size, size, True) for size in self.decode)
        mixed = (self._mixed(size) for size in self.mixed)
        return tuple(sorted((*decode, *mixed), reverse=True))

    def pick(self, plan: StepPlan, *, scores_prompt: bool) -> Bucket:
        """The smallest shape that holds the plan.

        A step that scores prompt tokens takes a mixed shape also when every row has one token.
        """
        if plan.rows[-1].length == 1 and not scores_prompt:
            size = _at_least(self.decode, len(plan.rows))
            return Bucket(size, size, True)
        return self._mixed(_at_least(self.mixed, plan.num_tokens))

    @property
    def sampling(self) -> tuple[int, ...]:
        """Row counts of sampling programs, ascending.

        None has a single row: XLA multiplies a lone row of bfloat16 by the vocabulary only after
        it has converted all weights to float32 (1.2 ms instead of 0.24 on an H200, 8B model).
        """
        return tuple(size for size in self.decode if size > 1) or (2,)

    def sampling_rows(self, num_rows: int) -> int:
        """Rows of the smallest sampling program that holds so many."""
        return _at_least(self.sampling, num_rows)

    def _mixed(self, num_tokens: int) -> Bucket:
        return Bucket(num_tokens, min(num_tokens, self.max_num_seqs), False)


def _sizes(smallest: int, largest: int, *, dense_from: int) -> tuple[int, ...]:
    """Powers of two from `smallest`, with one more between each pair from `dense_from` on."""
    sizes = {largest}
    size = smallest
    while size < largest:
        sizes.add(size)
        if dense_from <= size and size * 3 // 2 < largest:
            sizes.add(size * 3 // 2)
        size *= 2
    return tuple(sorted(sizes))


def _at_least(sizes: tuple[int, ...], wanted: int) -> int:
    index = bisect_left(sizes, wanted)
    assert index < len(sizes), f"a plan of {wanted} does not fit the largest bucket {sizes[-1]}"
    return sizes[index]
