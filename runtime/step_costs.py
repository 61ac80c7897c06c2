"""What steps cost, learnt from those that ran: the scheduler shares work out by it, not by tokens.

The time of a step is taken as linear in what it does. Weights are read whatever it does, each token
is multiplied by them, rows of one token read their context, and longer ones attend to theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paged.runtime.plan import StepPlan

# What one step more does to the weight of those before it: some 200 of them count.
_DECAY = 0.995
_STEPS_BETWEEN_FITS = 8
_FEWEST_STEPS = 32
# Of each feature, so that the numbers to solve for are alike.
_SCALES = np.array([1.0, 1e-3, 1e-5, 1e-7])
_RIDGE = 1e-6


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


class CostLearner:
    """Fits the costs to steps, the newest of which count most.

    Attributes:
        costs: as of the last fit; to begin with, those of `StepCosts`.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._squares = np.zeros((4, 4))
        self._products = np.zeros(4)
        self._num_steps = 0

    def observe(self, work: Work, seconds: float) -> None:
        """Take note of a step, which took more than no time. What counts is the relative error."""
        features = _SCALES * (1, *work) / seconds
        self._squares = _DECAY * self._squares + np.outer(features, features)
        self._products = _DECAY * self._products + features
        self._num_steps += 1
        if self._num_steps >= _FEWEST_STEPS and self._num_steps % _STEPS_BETWEEN_FITS == 0:
            self._fit()

    def _fit(self) -> None:
        """Least squares. What could not be told apart, or comes out below 0, costs nothing."""
        ridge = _RIDGE * np.trace(self._squares) / 4 * np.eye(4)
        fixed, token, context, pair = _SCALES * np.linalg.solve(
            self._squares + ridge, self._products
        )
        if token <= 0:
            return  # steps of one size tell nothing of a token
        self.costs = StepCosts(*(float(max(each, 0.0) / token) for each in (fixed, context, pair)))
