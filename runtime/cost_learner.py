"""What steps cost, learnt from those that ran."""

from __future__ import annotations

import numpy as np

from paged.runtime.step_costs import StepCosts, Work

# What one step more does to the weight of those before it: some 200 of them count.
_DECAY = 0.995
_STEPS_BETWEEN_FITS = 8
_FEWEST_STEPS = 32
# Of each feature, so that the numbers to solve for are alike.
_SCALES = np.array([1.0, 1e-3, 1e-5, 1e-7])
_RIDGE = 1e-6


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
