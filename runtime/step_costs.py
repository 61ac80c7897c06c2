"""What steps cost: the policy "lanes" shares work out by it, not by tokens.

The time of a step is taken as linear in what it does. Weights are read whatever it does, each token
is multiplied by them, rows of one token read their context, and longer ones attend to theirs. The
tokens of a step with chunks are those of the shape that it is compiled for: padding costs as much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from paged.runtime.plan import StepPlan


def padded(num_tokens: int, sizes: Sequence[int]) -> int:
    """The least of ascending sizes that holds so many tokens; as many as they are, if none does."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else num_tokens


class StepCosts(NamedTuple):
    """Work in a step, in what a token costs without its context.

    By default as a model of 8B parameters has it on an H200.

    Attributes:
        fixed: of a step, whatever it does: weights are read.
        context: of a token that a row of one token reads.
        pairs: of a token of a chunk, for each token before it.
    """

    fixed: float = 170.0
    context: float = 1.3e-3
    pairs: float = 3.5e-5

    def of_decode(self, context: int) -> float:
        """Of a row of one token."""
        return 1 + self.context * context

    def chunk(self, work: float, start: int) -> int:
        """Tokens of a chunk that begins at `start`, for so much work."""
        flat = max(work, 0.0)
        return int(flat / (1 + self.pairs * (start + flat / 2)))

    def attending(self, work: float, start: int, most: int) -> int:
        """As `chunk`, of `most` tokens at most, which cost their attention alone."""
        each = self.pairs * (start + most / 2)
        return most if each * most <= work else int(work / each)


class Work(NamedTuple):
    """What a step does: tokens, and the contexts of its rows as `StepCosts` count them."""

    tokens: int
    context: int
    pairs: float

    @classmethod
    def of(cls, plan: StepPlan, sizes: Sequence[int] = ()) -> Work:
        """That of a plan, whose step is compiled for one of these sizes if it has chunks."""
        tokens = context = 0
        pairs = 0.0
        for row in plan.rows:
            tokens += row.length
            if row.length == 1:
                context += row.start
            else:
                pairs += row.length * (row.start + row.length / 2)
        return cls(padded(tokens, sizes) if pairs else tokens, context, pairs)
