"""What a learner makes of steps whose costs are known, and of clocks that are not to be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from paged.runtime.cost_learner import CostLearner
from paged.runtime.step_costs import StepCosts, Work

TRUE = StepCosts(fixed=120.0, context=2e-3, pairs=4e-5)
SECONDS = 1e-5  # of a token
Clock = Callable[[list[float], np.random.Generator], list[float]]


def units(costs: StepCosts, work: Work) -> float:
    return costs.fixed + work.tokens + costs.context * work.context + costs.pairs * work.pairs


def mixed(number: int, seed: int = 0) -> Iterator[Work]:
    """Steps of rows that decode and, two times in three, a chunk."""
    random = np.random.default_rng(seed)
    for _ in range(number):
        rows, length = int(random.integers(1, 128)), int(random.integers(100, 2_000))
        chunk = int(random.integers(16, 1_000)) if random.random() < 2 / 3 else 0
        start = float(random.integers(0, 8_000))
        yield Work(rows + chunk, rows * length, chunk * (start + chunk / 2))


def decoding(number: int) -> Iterator[Work]:
    """Eight rows whose contexts grow."""
    return (Work(8, 8 * (500 + step % 200), 0.0) for step in range(number))


def exact(seconds: list[float], random: np.random.Generator) -> list[float]:
    return seconds


def noisy(seconds: list[float], random: np.random.Generator) -> list[float]:
    return [each * random.uniform(0.9, 1.1) for each in seconds]


def paused(seconds: list[float], random: np.random.Generator) -> list[float]:
    """One in twenty is held up, as by a compile or another program."""
    return [each * (50 if random.random() < 0.05 else 1) for each in noisy(seconds, random)]


def read_late(seconds: list[float], random: np.random.Generator) -> list[float]:
    """One in twenty is read when the next one has ended too, which then seems to take no time."""
    found = noisy(seconds, random)
    for index in np.flatnonzero(random.random(len(found) - 1) < 0.05):
        found[index] += found[index + 1]
        found[index + 1] = 1e-6
    return found


def taught(
    work: list[Work], clock: Clock, costs: StepCosts = TRUE, learner: CostLearner | None = None
) -> CostLearner:
    learner = learner or CostLearner()
    seconds = [SECONDS * units(costs, each) for each in work]
    for each, took in zip(work, clock(seconds, np.random.default_rng(1)), strict=True):
        learner.observe(each, took)
    return learner


def error(learner: CostLearner, costs: StepCosts = TRUE) -> float:
    """The greatest of a step's, as a share of its cost, over steps that it has not seen."""
    work = list(mixed(100, seed=9))
    return max(abs(units(learner.costs, each) / units(costs, each) - 1) for each in work)


@pytest.mark.parametrize(
    ("clock", "most"), [(exact, 0.01), (noisy, 0.1), (paused, 0.12), (read_late, 0.12)]
)
def test_costs_are_learnt_whatever_the_clock_says(clock: Clock, most: float) -> None:
    assert error(CostLearner()) > 0.15, "or there would be nothing to learn"
    assert error(taught(list(mixed(600)), clock)) < most


def test_each_cost_is_told_apart() -> None:
    costs = taught(list(mixed(600)), noisy).costs
    assert costs.fixed == pytest.approx(TRUE.fixed, rel=0.25)
    assert costs.context == pytest.approx(TRUE.context, rel=0.25)
    assert costs.pairs == pytest.approx(TRUE.pairs, rel=0.25)


def test_padding_is_part_of_what_tokens_cost() -> None:
    """A step takes the time of its bucket, of which a quarter is padding on average."""
    learner = CostLearner()
    for work in mixed(600):
        padded = work._replace(tokens=2 ** int(np.ceil(np.log2(work.tokens))))
        learner.observe(work, SECONDS * units(TRUE, padded))
    costs = TRUE._replace(fixed=TRUE.fixed / 1.35, context=TRUE.context / 1.35)
    assert error(learner, costs._replace(pairs=TRUE.pairs / 1.35)) < 0.15


def test_what_chunks_cost_is_not_forgotten_while_there_are_none() -> None:
    learner = taught(list(mixed(300)), noisy)
    assert error(taught(list(decoding(3_000)), noisy, learner=learner)) < 0.15


def test_what_has_changed_is_learnt_anew() -> None:
    learner = taught(list(mixed(300)), noisy)
    changed = TRUE._replace(context=3 * TRUE.context, pairs=2 * TRUE.pairs)
    assert error(learner, changed) > 0.3
    assert error(taught(list(mixed(600, seed=2)), noisy, changed, learner), changed) < 0.15


def test_a_machine_of_another_speed_has_the_same_costs() -> None:
    learner, slow = taught(list(mixed(300)), noisy), list(mixed(600, seed=2))
    for work in slow:
        learner.observe(work, 20 * SECONDS * units(TRUE, work))
    assert error(learner) < 0.05


def test_nothing_costs_less_than_nothing() -> None:
    """Of what is free, noise must not make more."""
    free = StepCosts(fixed=0.0, context=0.0, pairs=4e-5)
    costs = taught(list(mixed(600)), noisy, free).costs
    assert min(costs) >= 0
    assert costs.pairs == pytest.approx(free.pairs, rel=0.15)
    assert costs.fixed < 10


def test_steps_that_are_all_alike_change_nothing_but_the_speed() -> None:
    learner = taught([Work(1, 500, 0.0)] * 400, exact)
    assert learner.costs == pytest.approx(StepCosts(), rel=0.05)
