"""Steps are counted by shape and size, and the host's time is without its waiting."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from paged.runtime import step_record
from paged.runtime.buckets import Bucket
from paged.runtime.plan import StepPlan
from paged.runtime.runner import InFlight, Started, StepResult, StepRunner
from paged.runtime.step_record import STEP_BOUNDS, TOKEN_BOUNDS, Counts, StepRecord
from tests.runtime.clock import Clock


@dataclass
class FakeStep:
    clock: Clock
    bucket: Bucket
    launch_time: float
    seconds_to_wait: float
    num_tokens: int = 3
    plan: Any = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self

    def read(self) -> StepResult:
        self.clock.now += self.seconds_to_wait
        return StepResult(np.zeros(1, np.int32), None, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_record, "time", clock)
    return clock


def test_a_step_is_launched_when_it_is_started() -> None:
    """Not when its tokens can be chosen, before which a guided one may wait for the host."""
    runner = StepRunner.__new__(StepRunner)
    runner._sample = lambda *_: ()  # type: ignore[assignment, method-assign]
    nothing: Any = None
    step = Started(nothing, nothing, 1.5, nothing, None)
    assert runner.finish(step).launch_time == 1.5


def test_values_are_counted_up_to_each_bound() -> None:
    counts = Counts((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        counts.add(value)
    found = counts.distribution()
    assert (found.counts, found.total) == ((2, 2, 1), 8)


def test_a_step_begins_when_the_one_before_it_is_done(clock: Clock) -> None:
    record, bucket = StepRecord(), Bucket(4, 4, True)
    first, second = FakeStep(clock, bucket, 0.0, 0.03), FakeStep(clock, bucket, 0.01, 0.02)
    record.launched(first)  # type: ignore[arg-type]
    record.launched(second)  # type: ignore[arg-type]
    record.read(first)  # type: ignore[arg-type]
    record.read(second)  # type: ignore[arg-type]
    found = record.stats()
    assert found.seconds["decode_4"].total == pytest.approx(0.03 + 0.02)
    assert sum(found.seconds["decode_4"].counts) == 2
    assert (found.num_tokens.total, found.num_places) == (6, 8)
    assert len(found.num_tokens.counts) == len(TOKEN_BOUNDS) + 1
    assert len(found.seconds["decode_4"].counts) == len(STEP_BOUNDS) + 1


def test_the_hosts_time_is_without_its_waiting(clock: Clock) -> None:
    record = StepRecord()
    step = FakeStep(clock, Bucket(16, 8, False), 0.0, 0.5)
    record.begin()
    clock.now += 0.002
    record.launched(step)  # type: ignore[arg-type]
    record.read(step)  # type: ignore[arg-type]
    record.end()
    record.begin()  # a call that launches nothing is no step
    clock.now += 1
    record.end()
    found = record.stats()
    assert found.host_seconds.total == pytest.approx(0.002)
    assert [*found.seconds] == ["mixed_16"]


def test_steps_in_flight_have_an_age() -> None:
    plan = StepPlan((), (), (), ())
    step = InFlight(plan, Bucket(1, 1, True), 0.0, None, None)  # type: ignore[arg-type]
    assert step.age > 0
