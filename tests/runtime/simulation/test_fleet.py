"""Fleets on a clock of their own: every request is answered, at the times that steps take."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.runtime.buckets import Buckets
from paged.runtime.routing import POLICIES, Policy
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.simulation.autoscaling import Autoscaler, Autoscaling
from paged.runtime.simulation.fleet import EngineShape, Fleet, Outcome
from paged.runtime.simulation.step_times import StepTimes
from paged.runtime.simulation.traces import (
    Agents,
    Alike,
    Bursts,
    Chats,
    Tree,
    Turn,
    Workload,
    num_turns,
    tokens_of,
    trees,
)

# A step takes 10 ms, however much it does; a row 0 ms more.
FLAT = StepTimes(tokens=(1, 512), dense=(10.0, 10.0), context=0.0, pairs=0.0, again=0.0)
WORKLOADS: tuple[Workload, ...] = (
    Chats(turns=2, pause=0.2),
    Agents(apps=2, system=128, steps=2, helpers=2),
    Alike(40, 5, 64),
)
SHAPE = EngineShape(SchedulerConfig(8, 256, 2048), FLAT, num_pages=400)


def paced(made: Sequence[Tree], gap: float) -> list[Tree]:
    return [replace(tree, seconds=gap * number) for number, tree in enumerate(made)]


def run(made: Sequence[Tree], num_replicas: int = 2, policy: Policy = "prefix") -> Outcome:
    return Fleet(SHAPE, num_replicas, policy).run(made)


def test_a_request_alone_takes_its_steps() -> None:
    outcome = run([Tree(1.0, [], Turn(100, 4))], num_replicas=1)
    [served] = outcome.served
    assert served[3:] == (100, 0, 4)
    assert served[:3] == pytest.approx((1.0, 1.01, 1.04))
    assert outcome.busy_seconds == pytest.approx(0.04)
    assert outcome.replica_seconds == pytest.approx(1.04)
    assert outcome.num_steps == 4


def test_replicas_know_the_shapes_of_their_steps() -> None:
    sizes = SHAPE.start().scheduler.config.step_sizes
    assert sizes == Buckets.make(8, 256).mixed


def test_who_comes_during_a_step_joins_the_one_after_the_next() -> None:
    """The next one is enqueued already: the host is a step ahead of the device."""
    made = [Tree(0.0, [], Turn(10, 50)), Tree(0.105, [], Turn(10, 2))]
    _, second = sorted(run(made, num_replicas=1).served, key=lambda each: each.arrival)
    assert second.first == pytest.approx(0.13)


def test_a_conversation_finds_what_was_said() -> None:
    last = Turn(20, 8, pause=1.0, then=(Turn(30, 8, 0.5), Turn(40, 8, 0.25)))
    outcome = run([Tree(0.0, tokens_of(7, 256), replace(last, pause=0.0))])
    first, *rest = outcome.served
    assert [each.num_prompt for each in rest] == [256 + 20 + 8 + 40, 256 + 20 + 8 + 30]
    assert [each.arrival - first.last for each in rest] == pytest.approx([0.25, 0.5])
    # All that was computed: of the last token of an answer nothing is in pages.
    assert all(each.num_cached == 256 + 20 + 7 for each in rest)


@settings(max_examples=12, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    workload=st.sampled_from(
        [
            Chats(turns=2, pause=0.2),
            Agents(apps=2, system=128, steps=2, helpers=2),
            Alike(40, 5, 64),
        ]
    ),
    seed=st.integers(0, 99),
    num_replicas=st.integers(1, 4),
)
def test_every_turn_is_answered_in_full(
    policy: Policy, workload: Workload, seed: int, num_replicas: int
) -> None:
    made = paced(trees(workload, 30, seed), 0.02)
    outcome = run(made, num_replicas, policy)
    total = sum(num_turns(each.first) for each in made)
    lost = outcome.num_too_long
    assert len(outcome.served) <= total
    assert len(outcome.served) == total or lost
    assert all(each.arrival < each.first <= each.last for each in outcome.served)
    assert all(0 <= each.num_cached < each.num_prompt for each in outcome.served)
    assert outcome.busy_seconds <= outcome.replica_seconds
    assert outcome == run(made, num_replicas, policy), "a run is not repeatable"


def test_what_is_too_long_is_left_out_with_what_follows() -> None:
    too_long = Turn(2000, 100, then=(Turn(1, 1),))
    outcome = run([Tree(0.0, [], too_long), Tree(0.0, [], Turn(5, 5))])
    assert (len(outcome.served), outcome.num_too_long) == (1, 1)


def test_after_the_end_nobody_asks() -> None:
    made = [Tree(0.0, [], Turn(10, 10, then=(Turn(10, 10, pause=5.0),)))]
    outcome = Fleet(SHAPE, 1).run(made, until=3.0)
    assert len(outcome.served) == 1
    assert outcome.replica_seconds == pytest.approx(0.1)


def test_more_is_found_where_the_prefix_went() -> None:
    made = paced(trees(Agents(apps=4, system=512, steps=3, helpers=2), 200, 1), 0.3)
    shares = {}
    for policy in POLICIES:
        served = run(made, 4, policy).served
        shares[policy] = sum(s.num_cached for s in served) / sum(s.num_prompt for s in served)
    assert shares["prefix"] > 1.2 * shares["random"]
    assert shares["prefix"] > 1.2 * shares["least_loaded"]


def test_bursts_keep_the_mean_rate() -> None:
    times = np.arange(6000) / 10  # 10 a second for 600 s
    bursts = Bursts(factor=4, seconds=10, every=60)
    moved = bursts.warp(times)
    assert np.all(np.diff(moved) >= 0)
    per_minute = np.histogram(moved, bins=np.arange(0, 601, 60))[0]
    assert per_minute == pytest.approx(600, abs=1)
    assert np.count_nonzero(moved % 60 < 10) == pytest.approx(4000, abs=10)
    assert bursts.even(600) == pytest.approx(600)
    assert bursts.even(65) == pytest.approx(60 + 4 * 5)
    with pytest.raises(ValueError, match="at most 15 seconds"):
        Bursts(factor=4, seconds=20, every=60)


RULE = Autoscaling(least=1, most=5, target=10, interval=1, up_delay=3, down_delay=20)


def test_the_autoscaler_waits_before_it_acts() -> None:
    scaler = Autoscaler(RULE)
    assert [scaler.wanted(now, 1, 25) for now in range(4)] == [1, 1, 1, 3]
    assert scaler.wanted(9.0, 3, 500) == 3
    assert scaler.wanted(12.0, 3, 500) == 5  # no more than it may
    assert scaler.wanted(13.0, 5, 0) == 5
    assert scaler.wanted(14.0, 5, 50) == 5  # enough for all again: the wait begins anew
    assert [scaler.wanted(float(now), 5, 0) for now in (15, 34, 35)] == [5, 5, 1]


def test_a_fleet_grows_and_shrinks_and_loses_nothing() -> None:
    rule = replace(RULE, target=2, start_seconds=2.0, down_delay=5)
    busy = [Tree(0.05 * number, [], Turn(32, 40)) for number in range(200)]
    late = [Tree(30.0 + number, [], Turn(32, 2)) for number in range(30)]
    outcome = Fleet(SHAPE, 1, scaling=rule).run([*busy, *late])
    assert len(outcome.served) == 230
    sizes = [size for _, size, _ in outcome.sizes]
    assert max(sizes) == 5
    assert sizes[0] == sizes[-1] == 1
    assert outcome.end < outcome.replica_seconds < 5 * outcome.end


def test_one_that_takes_requests_always_stays() -> None:
    """What is wanted only for a moment has not started when it goes again."""
    rule = replace(RULE, target=1, up_delay=0, down_delay=0, start_seconds=100.0)
    made = [Tree(0.9, [], Turn(32, 40)), *(Tree(1.0 + n, [], Turn(32, 40)) for n in range(9))]
    outcome = Fleet(SHAPE, 1, scaling=rule).run([Tree(0.5, [], Turn(32, 80)), *made])
    assert len(outcome.served) == 11
    assert max(size for _, size, _ in outcome.sizes) > 1


def test_rules_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="got 3 to 2"):
        Autoscaling(least=3, most=2)
    with pytest.raises(ValueError, match="must be above 0"):
        Autoscaling(least=1, most=2, target=0)
