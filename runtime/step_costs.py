"""What steps cost: the policy "lanes" shares work out by it, not by tokens.

The time of a step is taken as linear in what it does. Weights are read whatever it does, each token
is multiplied by them, rows of one token read their context, and longer ones attend to theirs.
"""

from __future__ import annotations

from typing import NamedTuple

from paged.runtime.plan import StepPlan


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


class Work(NamedTuple):
    """What a step does: tokens, and the contexts of its rows as `StepCosts` count them."""

    tokens: int
    context: int
    pairs: float

    @classmethod
    def of(cls, plan: StepPlan) -> Work:
        """That of a plan."""
        tokens = context = 0
        pairs = 0.0
        for row in plan.rows:
            tokens += row.length
            if row.length == 1:
                context += row.start
            else:
                pairs += row.length * (row.start + row.length / 2)
        return cls(tokens, context, pairs)
