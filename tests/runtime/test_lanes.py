"""The policy "lanes": what short requests lose to long ones is bounded, and so is the reverse."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.mixed_lengths import Result, parser, results
from paged.pool import PagePool
from paged.runtime.lanes import LEAST_CHUNK, Lanes
from paged.runtime.order import LANE_SECONDS
from paged.runtime.plan import StepPlan
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import Sequence, SequenceLimits
from paged.runtime.step_costs import StepCosts

PAGE_SIZE = 16


def scheduler(
    num_pages: int = 2_000,
    lanes: Lanes | None = None,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 4_096,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        policy="lanes",
        lanes=lanes or Lanes(long_prompt=100),
    )
    return Scheduler(config, PagePool(num_pages, PAGE_SIZE))


def sequence(number: int, length: int, max_tokens: int = 4, **fields: object) -> Sequence:
    prompt = [number, *range(length - 1)]
    return Sequence(number, prompt, SequenceLimits(max_tokens), **fields)  # type: ignore[arg-type]


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, [0] * len(plan.rows))
    return plan


def drain(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        step(scheduler)


def lengths(plan: StepPlan) -> dict[int, int]:
    return {row.sequence.sequence_id: row.length for row in plan.rows}


def mixed(spreads: str, seed: int) -> dict[tuple[float, str], Result]:
    """100 requests of 300 tokens in and 128 out, and 10 of 30,000 in, on a simulated H200."""
    args = parser().parse_args(["", "--simulate", "--spreads", spreads, "--seed", str(seed)])
    return {(each.spread, each.case): each for each in results(args)}


@pytest.mark.parametrize("seed", [0, 1])
def test_short_requests_lose_little_to_long_ones_and_these_little_to_them(seed: int) -> None:
    found = mixed("0,2", seed)
    for spread in (0.0, 2.0):
        alone, fcfs, lanes = (found[spread, case] for case in ("alone", "fcfs", "lanes"))
        # Whoever comes while long ones alone are computed waits for two such steps.
        two_steps = 0.06 if spread else 0.0
        assert lanes.first[99] <= 1.5 * alone.first[99] + two_steps
        assert lanes.last[99] <= 1.5 * alone.last[99]
        assert lanes.long_rate >= 0.8 * fcfs.long_rate
        assert fcfs.last[99] > 5 * alone.last[99], "no burden to be freed from"


def test_a_step_keeps_most_of_its_work_for_short_ones() -> None:
    busy = scheduler(lanes=Lanes(long_prompt=100, share=0.75))
    busy.costs = StepCosts(fixed=92.5, context=0, pairs=0)
    busy.add(sequence(0, 2_000))
    busy.add(sequence(1, 30))
    assert lengths(step(busy)) == {1: 30, 0: int((92.5 + 30) / 3)}
    assert lengths(step(busy)) == {1: 1, 0: int((92.5 + 1) / 3)}


def test_beside_more_short_ones_than_fit_long_ones_get_the_rest() -> None:
    busy = scheduler(lanes=Lanes(long_prompt=100, share=0.75))
    busy.add(sequence(0, 2_000))
    step(busy)
    for number in range(1, 8):
        busy.add(sequence(number, 90))
    plan = lengths(step(busy))
    assert plan[0] == 256 // 4
    assert sum(plan.values()) == 256


def test_alone_long_ones_leave_steps_short() -> None:
    idle = scheduler(lanes=Lanes(long_prompt=100, alone=50))
    idle.costs = StepCosts(fixed=90, context=0, pairs=0)
    idle.add(sequence(0, 2_000))
    assert lengths(step(idle)) == {0: 50}


def test_long_prompts_are_computed_one_after_the_other() -> None:
    for most in (1, 2):
        idle = scheduler(lanes=Lanes(long_prompt=100, most_long=most, alone=200))
        for number in range(4):
            idle.add(sequence(number, 500))
        running = [len(step(idle).rows) for _ in range(2)]
        assert running[-1] == most


def test_what_the_cache_holds_is_not_long() -> None:
    cached = scheduler()
    cached.add(sequence(0, 800))
    drain(cached)
    again = Sequence(1, [*sequence(0, 800).prompt, *[1] * 50], SequenceLimits(4))
    cached.add(again)
    found = [again.is_long]
    cached.reset_prefix_cache()
    cached.add(sequence(2, 60))
    step(cached)
    assert [*found, again.is_long] == [False, True], "what it was to find is gone"
    drain(cached)
    assert len(again.outputs) == 4


def test_forks_of_a_long_one_share_its_prompt() -> None:
    forked = scheduler()
    parent = sequence(0, 600, max_tokens=30)
    fork = Sequence(1, parent.prompt, SequenceLimits(30), parent=parent)
    for each in (parent, fork, sequence(2, 600)):
        forked.add(each)
    drain(forked)
    assert fork.num_cached == 599


def test_priorities_count_within_a_lane() -> None:
    line = scheduler(max_num_seqs=1)
    for number, priority in ((0, 1), (1, -1), (2, 0)):
        line.add(sequence(number, 300, priority=priority))
    order = []
    while line.has_work:
        order += [each.sequence_id for each in step(line).admitted]
    assert order == [1, 2, 0]


def test_a_long_one_moves_on_beside_short_ones_without_end() -> None:
    busy, random = scheduler(max_num_batched_tokens=64), Random(0)
    long = sequence(0, 1_000, max_tokens=1)
    busy.add(long)
    num_steps = number = 0
    while not long.finished:
        while busy.num_waiting < 12:
            number += 1
            length = random.randint(1, 90)
            busy.add(sequence(number, length, random.randint(1, 9), arrival=num_steps * 0.1))
        step(busy)
        num_steps += 1
    # Seconds at its lane's place in the line, then steps of no less than the rest of the budget.
    assert num_steps <= LANE_SECONDS / 0.1 + 1_000 / min(LEAST_CHUNK, 0.15 * 64) + 200


def test_long_ones_leave_pages_and_slots_to_short_ones() -> None:
    busy = scheduler(num_pages=201, max_model_len=1_200)
    for number in range(3):
        busy.add(sequence(number, 950, max_tokens=200))
    for _ in range(60):
        step(busy)
    assert busy.num_running == 2, "60 pages each and more, and 25 are kept"
    busy.add(sequence(9, 90))
    assert 9 in lengths(step(busy))


def test_one_that_needs_all_pages_gets_them() -> None:
    small = scheduler(num_pages=260)
    for number in range(2):
        small.add(sequence(number, 4_000, max_tokens=2))
    drain(small)


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong in ({"share": 0.3}, {"share": 1.0}, {"long_prompt": 0}, {"most_long": 0}):
        with pytest.raises(ValueError, match="must be at least"):
            Lanes(**wrong)
    with pytest.raises(ValueError, match="chunked prefill"):
        SchedulerConfig(4, 64, 64, policy="lanes", enable_chunked_prefill=False)
