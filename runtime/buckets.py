"""The padded shapes that steps are compiled for. Warm-up, packing and benchmarks all ask here."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from paged.runtime.plan import StepPlan

# Chosen among many by `benchmarks/step_simulation.py`. Up to about 200 tokens a step reads weights
# most of its time, and padding costs little; from there on it costs as much as tokens do. Chats of
# mixed lengths, with prompts arriving one by one, make steps of 200 to 2,000 tokens.
_DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
_MIXED = (16, 64, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192)
_SAMPLING = (1, 2, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)

FEWEST_ROWS_ON_GPU = 2
"""XLA is slow with a lone row on a GPU: it takes three kernels for a norm that otherwise takes one,
and multiplies by the vocabulary only after it has converted all weights to float32 (1.2 ms instead
of 0.24 on an H200, 8B model)."""


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

    @property
    def name(self) -> str:
        """What metrics call it."""
        return f"{'decode' if self.decode_only else 'mixed'}_{self.num_tokens}"


@dataclass(frozen=True)
class Buckets:
    """All shapes of an engine.

    Attributes:
        decode: row counts of decode steps, ascending; the last is max_num_seqs.
        mixed: token counts of steps with chunks, ascending; the last is max_num_batched_tokens.
        sampling: row counts of sampling programs, ascending; the last holds max_num_seqs.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    sampling: tuple[int, ...]

    @classmethod
    def make(
        cls, max_num_seqs: int, max_num_batched_tokens: int, *, fewest_rows: int = 1
    ) -> Buckets:
        """Few programs, little time lost to padding.

        Args:
            fewest_rows: what fewer rows are padded to, except that a decode step has no more than
                max_num_seqs.
        """
        decode = _rungs(_DECODE, max_num_seqs)
        sampling = _rungs(_SAMPLING, max(max_num_seqs, fewest_rows))
        return cls(
            decode=tuple(size for size in decode if size >= min(fewest_rows, max_num_seqs)),
            mixed=_rungs(_MIXED, max_num_batched_tokens),
            sampling=tuple(size for size in sampling if size >= fewest_rows),
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

        A step that scores prompt tokens takes a shape for that, also when every row has one token.
        """
        if scores_prompt:
            return self._mixed(_at_least(self.scoring, plan.num_tokens))
        if plan.rows[-1].length == 1:
            size = _at_least(self.decode, len(plan.rows))
            return Bucket(size, size, True)
        return self._mixed(_at_least(self.mixed, plan.num_tokens))

    @property
    def scoring(self) -> tuple[int, ...]:
        """Token counts of steps that score prompts, ascending: few, for they are rare."""
        return self.mixed[::-4][::-1]

    def sampling_rows(self, num_rows: int) -> int:
        """Rows of the smallest sampling program that holds so many."""
        return _at_least(self.sampling, num_rows)

    def _mixed(self, num_tokens: int) -> Bucket:
        return Bucket(num_tokens, min(num_tokens, self.max_num_seqs), False)


def _rungs(ladder: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """The sizes below `largest`, and itself; beyond the ladder's end they double."""
    sizes = list(ladder)
    while 2 * sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < largest), largest)


def _at_least(sizes: tuple[int, ...], wanted: int) -> int:
    index = bisect_left(sizes, wanted)
    assert index < len(sizes), f"a plan of {wanted} does not fit the largest bucket {sizes[-1]}"
    return sizes[index]
