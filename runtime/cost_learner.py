"""What steps cost, learnt from those that ran."""

from __future__ import annotations

import numpy as np

from paged.runtime.least_squares import least_squares
from paged.runtime.step_costs import StepCosts, Work

_NUM_STEPS = 256
_STEPS_BETWEEN_FITS = 8
_FEWEST_STEPS = 32
# A step that takes so many times what is expected of it counts as if it took just that, and one
# that takes so much less likewise: the host was held up, or read the step before late.
_MOST = 1.5
# What is known of a cost from before weighs as much as this share of the steps, if they were all
# of nothing else.
_WEIGHT_OF_BEFORE = 0.003
# The least that this knowledge takes a cost for, as a share of what it is to begin with.
_LEAST = 0.1


class CostLearner:
    """Fits the costs to the newest steps.

    Errors count relative to what is expected of a step, not to what was measured: else a single
    step that seems to have taken no time would outweigh all others. What the newest steps do not
    tell apart, as the parts of steps that are all alike, stays as it was learnt before.

    Attributes:
        costs: as of the last fit; to begin with, those of `StepCosts`.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._features = np.zeros((_NUM_STEPS, 4))
        self._seconds = np.zeros(_NUM_STEPS)
        self._num_steps = 0
        self._found: np.ndarray | None = None  # seconds of each feature

    def observe(self, work: Work, seconds: float) -> None:
        """Take note of a step, which took more than no time."""
        place = self._num_steps % _NUM_STEPS
        self._features[place], self._seconds[place] = (1, *work), seconds
        self._num_steps += 1
        if self._num_steps >= _FEWEST_STEPS and self._num_steps % _STEPS_BETWEEN_FITS == 0:
            self._fit()

    def _fit(self) -> None:
        features, seconds = self._features[: self._num_steps], self._seconds[: self._num_steps]
        if self._found is None:  # the costs that are known, in the seconds of this machine
            fixed, context, pair = self.costs
            known = np.array([fixed, 1.0, context, pair])
            self._found = known * np.median(seconds / (features @ known))
            self._least = _LEAST * self._found
        expected = np.maximum(features @ self._found, 1e-9)
        took = np.clip(seconds / expected, 1 / _MOST, _MOST)
        # A row for each cost, which says that it is what it was.
        before = np.sqrt(_WEIGHT_OF_BEFORE * len(took)) / np.maximum(self._found, self._least)
        self._found = least_squares(
            np.vstack([features / expected[:, None], np.diag(before)]),
            np.concatenate([took, before * self._found]),
        )
        fixed, token, context, pair = map(float, self._found)
        if token > 0:
            self.costs = StepCosts(fixed / token, context / token, pair / token)
