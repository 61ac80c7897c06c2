"""Who may wait: the bound on the queue, estimates of it, and deadlines."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from paged.models.loading import ModelSource
from paged.runtime import core as core_module
from paged.runtime import gate as gate_module
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.errors import ConfigError
from paged.runtime.gate import Deadlines, DrainRate, Gate, Queue
from paged.runtime.messages import EngineRequest, SequenceOutput, Terms
from paged.runtime.sampling_params import SamplingParams
from tests.runtime.clock import Clock
from tests.runtime.test_core import drain, make_core, prompt_of, source

__all__ = ["source"]

IDLE = Queue(num_waiting=0, num_free=4, num_slots=4, backlog=(0, 0))
BUSY = Queue(num_waiting=3, num_free=0, num_slots=4, backlog=(900, 0))


def request(
    name: str = "a", length: int = 10, *, n: int = 1, max_tokens: int = 8, **terms: float
) -> EngineRequest:
    params = SamplingParams(n=n, temperature=float(n > 1), max_tokens=max_tokens, ignore_eos=True)
    wanted = {"num_sequences": n, "num_tokens": length} | terms
    return EngineRequest(name, prompt_of(length), params, terms=Terms(**wanted))  # type: ignore[arg-type]


def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What deadlines are looked up at from now on, so that none passes on a busy machine."""
    clock = Clock(1_000.0)
    for module in (core_module, gate_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stopped_clock(monkeypatch)


def cause(gate: Gate, queue: Queue, request: EngineRequest) -> str | None:
    refusal = gate.refusal(request, queue)
    return None if refusal is None else refusal.cause


def test_a_full_queue_takes_nobody() -> None:
    gate = Gate(max_sequences=4)
    assert cause(gate, BUSY, request()) is None
    assert cause(gate, BUSY, request(n=2)) == "queue"
    assert gate.refused["queue"] == 1
    assert (gate.room(IDLE), gate.room(BUSY), Gate().room(BUSY)) == (8, 1, None)


def test_free_slots_are_no_queue() -> None:
    nobody_waits = Gate(max_sequences=0)
    assert cause(nobody_waits, IDLE, request(n=4)) is None
    assert cause(nobody_waits, BUSY, request()) == "queue"


def test_what_never_fits_is_told_so() -> None:
    refusal = Gate(max_sequences=2).refusal(request(n=7), IDLE)
    assert refusal is not None
    assert (refusal.cause, refusal.retry_after) == ("size", 0)
    assert "6 sequences here, got 7" in refusal.message


def test_prompt_tokens_are_bounded_but_for_the_first() -> None:
    gate = Gate(max_tokens=1_000)
    assert cause(gate, BUSY, request(num_tokens=100)) is None
    assert cause(gate, BUSY, request(num_tokens=101)) == "tokens"
    assert cause(gate, IDLE, request(num_tokens=5_000)) is None


def test_who_has_asked_already_is_not_asked_again() -> None:
    assert cause(Gate(max_sequences=0), BUSY, request(num_sequences=0)) is None


def test_estimates_are_of_the_rate_of_late() -> None:
    gate = Gate()
    assert gate.wait(BUSY) == 0, "nothing is known yet"
    for _ in range(100):
        gate.rates[0].observe(50, 0.1)
    assert gate.wait(BUSY) == pytest.approx(1.8)
    assert gate.retry_after(BUSY, 3) == pytest.approx(1.8)
    assert gate.retry_after(BUSY, 1) == 1.0
    rate = gate.rates[0]
    for _ in range(1_000):
        rate.observe(5, 0.1)  # a tenth of it, for 100 s
    assert rate.seconds_for(500) == pytest.approx(10, rel=0.1)


def test_a_lane_has_a_rate_of_its_own(clock: Clock) -> None:
    gate = Gate()
    queue = Queue(5, 0, 4, backlog=(100, 50_000), longest_short=200)
    for _ in range(10):
        gate.rates[0].observe(1_000, 1.0)
        gate.rates[1].observe(1_000, 1.0)
    soon = clock.now + 5
    assert cause(gate, queue, request(deadline=soon)) is None
    assert cause(gate, queue, request(length=201, deadline=soon)) == "deadline"


@pytest.mark.parametrize("left", [-1e9, -1.0, 0.0, math.nan])
def test_deadlines_that_have_passed(left: float) -> None:
    refusal = Gate().refusal(request(deadline=time.monotonic() + left), IDLE)
    assert refusal is not None
    assert (refusal.cause, refusal.retry_after) == ("deadline", 0)


def test_deadlines_that_cannot_be_met(clock: Clock) -> None:
    gate = Gate()
    gate.rates[0].observe(100, 1.0)
    assert gate.refusal(request(deadline=clock.now + 20), BUSY) is None
    refusal = gate.refusal(request(deadline=clock.now + 4), BUSY)
    assert refusal is not None
    assert refusal.cause == "deadline"
    assert refusal.retry_after == pytest.approx(9 - 4)


def test_a_rate_needs_measurements() -> None:
    rate = DrainRate()
    rate.observe(10, 0.001)
    assert rate.seconds_for(1_000_000) == 0


def test_each_deadline_passes_once() -> None:
    deadlines = Deadlines()
    for name, when in (("a", 3.0), ("b", 1.0), ("c", 0.0)):
        deadlines.add(request(name, deadline=when))
    assert deadlines.passed(2.0) == ["b"]
    assert deadlines.passed(3.0) == ["a"]
    assert deadlines.passed(9.0) == []


@pytest.fixture(scope="module")
def bounded(source: ModelSource, compile_cache: str) -> Iterator[EngineCore]:
    """Four slots, and two more sequences may wait."""
    core = make_core(source, compile_cache, max_waiting=2)
    yield core
    core.close()


def reasons(news: list[SequenceOutput]) -> dict[tuple[str, int], str]:
    ended = [item for item in news if item.finish_reason is not None]
    return {(item.request_id, item.index): str(item.finish_reason) for item in ended}


def test_the_core_refuses_with_the_next_step(bounded: EngineCore) -> None:
    before = dict(bounded.stats().refused)
    for name in "abcdefg":
        bounded.add(request(name))
    bounded.add(request("n", n=2))
    bounded.add(request("exempt", num_sequences=0))
    assert bounded.stats().room == 0
    found = reasons(drain(bounded))
    refused = {key for key, reason in found.items() if reason == "refused"}
    assert refused == {("g", 0), ("n", 0), ("n", 1)}
    assert len(found) == 10
    stats = bounded.stats()
    assert (stats.room, stats.waiting_tokens) == (6, 0)
    assert stats.refused["queue"] - before["queue"] == 2


def test_an_id_that_was_refused_is_free(bounded: EngineCore) -> None:
    bounded.add(request("again", deadline=1.0))
    bounded.add(request("again"))
    news = drain(bounded)
    assert [item.finish_reason for item in news if item.finish_reason] == ["refused", "length"]


def test_what_runs_past_its_deadline_is_ended_and_its_pages_are_free(
    bounded: EngineCore, clock: Clock
) -> None:
    bounded._gate.rates = (DrainRate(), DrainRate())  # else it might be refused at once
    timeouts = bounded.stats().num_timeouts
    soon = clock.now + 0.3
    bounded.add(request("late", 40, n=3, max_tokens=200, deadline=soon))
    bounded.add(request("in time", max_tokens=4, deadline=soon + 60))
    news: list[SequenceOutput] = []
    while len(news) <= 60:
        assert bounded.has_work
        news += bounded.step()
    clock.now = soon
    news += drain(bounded)
    found = reasons(news)
    assert {found["late", index] for index in range(3)} == {"timeout"}
    assert found["in time", 0] == "length"
    assert sum(item.finish_reason is not None for item in news) == 4, "each ends once"
    stats = bounded.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert (stats.num_timeouts - timeouts, stats.waiting_tokens) == (1, 0)


def test_who_waits_past_its_deadline_is_ended_too(bounded: EngineCore, clock: Clock) -> None:
    bounded._gate.rates = (DrainRate(), DrainRate())  # else it would be refused at once
    for name in "abcd":
        bounded.add(request(name, max_tokens=100))
    bounded.add(request("waits", deadline=clock.now + 0.2))
    bounded.step()
    clock.now += 0.21
    assert reasons(bounded.step())["waits", 0] == "timeout"
    drain(bounded)


def test_an_id_may_live_again_beyond_the_deadline_of_its_first_life(
    bounded: EngineCore, clock: Clock
) -> None:
    bounded.add(request("twice", deadline=clock.now + 0.2))
    bounded.abort("twice")
    bounded.add(request("twice", max_tokens=3))
    clock.now += 0.21
    assert reasons(drain(bounded)) == {("twice", 0): "length"}


def test_whatever_comes_together_each_sequence_ends_once(bounded: EngineCore) -> None:
    random, num_live, ended = Random(0), Counter[str](), Counter[tuple[str, int]]()
    for number in range(150):
        name, n = str(number), random.choice((1, 1, 2, 3))
        soon = time.monotonic() + random.choice((-1e9, 0, 1e-4, 0.01, 0.05, 1e6, 1e18, math.inf))
        deadline = random.choice((0.0, soon))
        asked = random.choice((0, n))
        wanted = request(name, random.randint(1, 60), n=n, deadline=deadline, num_sequences=asked)
        bounded.add(wanted)
        num_live[name] = n
        for item in bounded.abort(str(random.randint(0, number))) if random.random() < 0.3 else ():
            ended[item.request_id, item.index] += 1
        for _ in range(random.choice((0, 0, 1, 3))):
            for item in bounded.step() if bounded.has_work else ():
                ended[item.request_id, item.index] += item.finish_reason is not None
    for item in drain(bounded):
        ended[item.request_id, item.index] += item.finish_reason is not None
    assert ended == {(name, index): 1 for name, n in num_live.items() for index in range(n)}
    stats = bounded.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert (stats.waiting_tokens, stats.room) == (0, 6)
    assert stats.num_free_pages + stats.num_cached_pages >= stats.num_pages


@pytest.mark.parametrize(
    "flags",
    [
        {"max_waiting": -1},
        {"max_waiting_tokens": 0},
        {"short_request_share": 0.2},
        {"short_request_share": float("nan")},
        {"long_prompt_threshold": 0},
        {"max_long_partial_prefills": 0},
        {"scheduling_policy": "lanes", "enable_chunked_prefill": False},
    ],
)
def test_flags_that_cannot_be(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        EngineConfig(**flags)  # type: ignore[arg-type]
