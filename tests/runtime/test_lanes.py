"""The policy "lanes": what short requests lose to long ones is bounded, and so is the reverse."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from benchmarks.mixed_lengths import Result, parser, results
from paged.pool import PagePool
from paged.runtime.gate import Gate
from paged.runtime.lanes import LEAST_CHUNK, Lanes
from paged.runtime.order import LANE_SECONDS
from paged.runtime.pace import Pace
from paged.runtime.plan import Row, StepPlan
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import Sequence, SequenceLimits
from paged.runtime.simulation.replica import Replica
from paged.runtime.step_costs import StepCosts, Work

PAGE_SIZE = 16
SIZES = (16, 64, 128, 192, 256)
Clock = Callable[[StepPlan], float]


def scheduler(
    num_pages: int = 2_000,
    lanes: Lanes | None = None,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 4_096,
    step_sizes: tuple[int, ...] = (),
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        policy="lanes",
        lanes=lanes or Lanes(long_prompt=100),
        step_sizes=step_sizes,
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


def work(costs: StepCosts, plan: StepPlan) -> float:
    """Of a step, its padding included."""
    done = Work.of(plan, SIZES)
    attention = costs.context * done.context + costs.pairs * done.pairs
    return costs.fixed + done.tokens + attention


def is_long_prompt(row: Row) -> bool:
    return row.sequence.is_long and row.start < len(row.sequence.prompt) - 1


def mixed(spreads: str, seed: int) -> dict[tuple[float, str], Result]:
    """100 requests of 300 tokens in and 128 out, and 10 of 30,000 in, on a simulated H200."""
    args = parser().parse_args(["", "--simulate", "--spreads", spreads, "--seed", str(seed)])
    return {(each.spread, each.case): each for each in results(args)}


@pytest.mark.parametrize("seed", [0, 1])
def test_short_requests_lose_little_to_long_ones_and_these_little_to_them(seed: int) -> None:
    found = mixed("0,2", seed)
    for spread in (0.0, 2.0):
        alone, fcfs, lanes = (found[spread, case] for case in ("alone", "fcfs", "lanes"))
        assert lanes.first[99] <= 1.3 * alone.first[99]
        assert lanes.last[99] <= 1.25 * alone.last[99]
        assert lanes.long_rate >= 0.85 * fcfs.long_rate
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


def test_alone_they_go_to_the_end_of_a_shape() -> None:
    idle = scheduler(lanes=Lanes(long_prompt=100, alone=70), step_sizes=SIZES)
    first = sequence(0, 300, max_tokens=9)
    idle.add(first)
    assert [lengths(step(idle)) for _ in range(3)] == [{0: 128}, {0: 128}, {0: 44}]
    idle.add(sequence(1, 300))
    assert lengths(step(idle)) == {0: 1, 1: 127}


def test_whoever_comes_waits_for_steps_of_so_much_work_up_to_the_end_of_a_shape() -> None:
    """Of each shape that a step goes to, its first token is within what long ones may do."""
    lanes = Lanes(long_prompt=100, alone=200)
    idle = scheduler(4_000, lanes, max_model_len=9_000, step_sizes=SIZES)
    idle.costs = costs = StepCosts(fixed=90, context=1e-2, pairs=3e-4)
    for number in range(6):
        idle.add(sequence(number, 8_000, max_tokens=60))
    sizes = set()
    while idle.num_waiting_long:
        plan = step(idle)
        [row] = filter(is_long_prompt, plan.rows)
        if row.start + row.length < len(row.sequence.prompt):
            assert plan.num_tokens in SIZES
            sizes.add(plan.num_tokens)
        decodes = sum(costs.of_decode(each.start) for each in plan.rows if each is not row)
        before = max((size for size in SIZES if size < plan.num_tokens), default=0)
        length = before + 1 - (len(plan.rows) - 1)
        allowed = max(lanes.alone - decodes, LEAST_CHUNK)
        assert length * (1 + costs.pairs * (row.start + length / 2)) <= allowed + 1
    assert len(sizes) > 2, "contexts of one length, or costs that do not heed them"


def test_beside_short_ones_a_chunk_fills_what_were_padding() -> None:
    found = []
    for share, sizes in ((0.75, ()), (0.8, SIZES), (0.75, SIZES), (0.8, SIZES[-1:])):
        busy = scheduler(lanes=Lanes(long_prompt=100, share=share), step_sizes=sizes)
        busy.costs = StepCosts(fixed=92.5, context=0, pairs=0)
        busy.add(sequence(0, 2_000))
        busy.add(sequence(1, 70))
        found.append(lengths(step(busy))[0])
    # The next shape has 64 tokens more, which is less than a third of a step, not than a quarter.
    assert found == [int((92.5 + 70) / 3), 128 - 70, 192 - 70, 256 - 70]


@pytest.mark.parametrize("fixed", [50, 300])
def test_with_long_prompts_a_step_takes_little_longer_than_without(fixed: int) -> None:
    random, lanes = Random(fixed), Lanes(long_prompt=100, share=0.8)
    busy = scheduler(9_000, lanes, max_num_seqs=32, max_model_len=9_000, step_sizes=SIZES)
    busy.costs = costs = StepCosts(fixed=fixed, context=1e-3, pairs=1e-4)
    for number in range(3):
        busy.add(sequence(number, 8_000, max_tokens=60))
    num_full = num_least = 0
    for number in range(3, 300):
        if random.random() < 0.6:
            busy.add(sequence(number, random.randint(2, 60), random.randint(1, 30)))
        plan = step(busy)
        others = tuple(row for row in plan.rows if not is_long_prompt(row))
        chunk = plan.num_tokens - sum(row.length for row in others)
        if all(row.sequence.is_long for row in others) or chunk <= LEAST_CHUNK:
            num_least += chunk == LEAST_CHUNK
            continue
        without = StepPlan(others, (), (), ())
        assert work(costs, plan) * lanes.share <= work(costs, without) + 1
        num_full += plan.num_tokens in SIZES
    assert num_full > 20
    assert num_least > 20 or fixed > 100


@pytest.mark.parametrize("alone", [100, 128])
def test_long_prompts_at_the_same_time_end_in_one_shape(alone: int) -> None:
    lanes = Lanes(long_prompt=100, most_long=2, alone=alone)
    idle = scheduler(lanes=lanes, step_sizes=SIZES)
    for number in range(2):
        idle.add(sequence(number, 900))
    step(idle)
    assert lengths(step(idle)) == {0: 128 - LEAST_CHUNK, 1: LEAST_CHUNK}


def simulate(busy: Scheduler, seconds: Clock) -> None:
    replica, now = Replica(busy, seconds), 0.0
    while (end := replica.launch(now)) is not None:
        now = end
        replica.read()


def serve(busy: Scheduler, seconds: Clock) -> None:
    pace, now = Pace(busy, Gate()), 0.0
    while (plan := busy.schedule()) is not None:
        now += seconds(plan)
        pace.take(plan, now)
        busy.update(plan, [0] * len(plan.rows))


@pytest.mark.parametrize("run", [simulate, serve])
def test_what_steps_cost_is_learnt_with_their_padding(
    run: Callable[[Scheduler, Clock], None],
) -> None:
    true = StepCosts(fixed=60.0, context=2e-3, pairs=2e-4)
    busy, random = scheduler(lanes=Lanes(long_prompt=300), step_sizes=SIZES), Random(0)
    for number in range(100):
        busy.add(sequence(number, random.randint(2, 3_000), random.randint(1, 20)))
    run(busy, lambda plan: 1e-5 * work(true, plan))
    assert busy.costs.fixed == pytest.approx(true.fixed, rel=0.1)
    assert busy.costs.pairs == pytest.approx(true.pairs, rel=0.1)


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
