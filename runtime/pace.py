"""What steps take, and who learns from it."""

from __future__ import annotations

import time

from paged.runtime.cost_learner import CostLearner
from paged.runtime.gate import Gate
from paged.runtime.plan import StepPlan
from paged.runtime.scheduler import Scheduler
from paged.runtime.step_costs import Work


class Pace:
    """Tells the gate how fast the queue goes, and under lanes the scheduler what steps cost."""

    def __init__(self, scheduler: Scheduler, gate: Gate) -> None:
        self._scheduler, self._gate = scheduler, gate
        self._learner = CostLearner() if scheduler.config.policy == "lanes" else None
        self._busy_since = 0.0  # since when the device has run the oldest step in flight

    def begin(self) -> None:
        """An idle device gets a step."""
        self._busy_since = time.monotonic()

    def take(self, plan: StepPlan, now: float) -> None:
        """Take note of a step that was read just now, before the scheduler does."""
        seconds, self._busy_since = now - self._busy_since, now
        if any(self._scheduler.backlog):
            self._gate.observe(plan, self._scheduler.backlog, seconds)
        if self._learner is not None:
            work = Work.of(plan, self._scheduler.config.step_sizes)
            self._learner.observe(work, max(seconds, 1e-6))
            self._scheduler.costs = self._learner.costs
