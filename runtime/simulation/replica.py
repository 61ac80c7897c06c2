"""One engine on a clock of its own: the real scheduler, and steps that take the time of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from paged.runtime.cost_learner import CostLearner
from paged.runtime.plan import StepPlan, TokenEvent
from paged.runtime.scheduler import Scheduler
from paged.runtime.sequence import Sequence
from paged.runtime.step_costs import Work


class _Launched(NamedTuple):
    plan: StepPlan
    seconds: float
    end: float


class Replica:
    """Runs sequences one step ahead, as the engine's core does.

    The device begins a step when it is launched and the one before it is done. The host takes no
    time of its own: it is taken as hidden behind the device.

        while (now := replica.launch(now)) is not None:
            events = replica.read()

    Attributes:
        busy: seconds that the device ran.
        num_steps: launched so far.

    Args:
        step_seconds: what a step of a plan takes; asked once for each, when it is launched.
    """

    def __init__(self, scheduler: Scheduler, step_seconds: Callable[[StepPlan], float]) -> None:
        self.scheduler = scheduler
        self.busy = 0.0
        self.num_steps = 0
        self._step_seconds = step_seconds
        self._in_flight: deque[_Launched] = deque()
        self._device_free = 0.0
        self._learner = CostLearner() if scheduler.config.policy == "lanes" else None

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight: then the next sequence is to be followed by `launch`."""
        return not self._in_flight

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.scheduler.add(sequence)

    def launch(self, now: float) -> float | None:
        """Launch what the host would before it waits for the oldest step.

        Returns:
            When that step is done, to be read; None if there is nothing to do.
        """
        while len(self._in_flight) < 2 and (plan := self.scheduler.schedule()) is not None:
            seconds = self._step_seconds(plan)
            self._device_free = max(now, self._device_free) + seconds
            self._in_flight.append(_Launched(plan, seconds, self._device_free))
            self.busy += seconds
            self.num_steps += 1
        return self._in_flight[0].end if self._in_flight else None

    def read(self) -> list[TokenEvent]:
        """Take in the oldest step. All tokens are 0."""
        step = self._in_flight.popleft()
        if self._learner is not None:
            work = Work.of(step.plan, self.scheduler.config.step_sizes)
            self._learner.observe(work, step.seconds)
            self.scheduler.costs = self._learner.costs
        return self.scheduler.update(step.plan, [0] * len(step.plan.rows))
