"""Workloads on an engine in this process, and the file that keeps what was found."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.bench.engine_load import run_workload
from paged.runtime.bench.results import (
    KEY,
    METRICS,
    BenchResult,
    RunResult,
    Times,
    now,
    read_result,
    write_result,
)
from paged.runtime.bench.workloads import BenchRequest, IdRange, random_requests
from paged.runtime.errors import ConfigError, EngineDead
from tests.runtime.fakes import FakeCore
from tests.runtime.fakes import engine as fake_engine


@pytest.fixture(scope="module")
def engine(engine_flags: dict[str, Any]) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(**engine_flags)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def run(engine: AsyncEngine) -> RunResult:
    """Four short requests, a text, and one that is refused."""
    short = random_requests(4, 20, 5, seed=1, ids=IdRange.below(256))
    requests = [
        *(replace(each, kind="short", priority=3) for each in short),
        BenchRequest("some text", 0, 4, arrival=0.05),
        BenchRequest([7] * 600, 600, 1, kind="long"),
    ]
    goals = {"ttft": 60_000.0}
    return run_workload(
        engine, requests, name="one", goals=goals, settings={"rate": 3}, num_warmups=2
    )


def test_a_workload_is_counted_and_timed(run: RunResult) -> None:
    assert (run.name, run.num_completed, run.num_failed) == ("one", 5, 1)
    assert run.num_input_tokens == 4 * 20 + len("some text")
    assert run.num_output_tokens == 4 * 5 + 4
    assert run.requests_per_second == pytest.approx(5 / run.duration)
    assert run.goodput == run.requests_per_second  # a minute is enough for each
    assert set(run.times) == set(METRICS)
    assert 0 < run.times["itl"].count <= 4 * 4 + 3  # what comes at once is one piece
    assert set(run.kinds) == {"short"}
    assert run.kinds["short"]["ttft"].count == 4
    assert "512" in (run.requests[-1].error or "")
    assert run.engine is not None
    assert (run.engine.compiles_after_warmup, run.settings) == (0, {"rate": 3})


def test_the_parts_of_a_request_add_up(run: RunResult) -> None:
    for each in run.requests[:5]:
        assert each.queue is not None
        assert 0 <= each.queue <= each.ttft <= each.e2el <= run.duration
        assert each.tpot * (each.num_output_tokens - 1) == pytest.approx(
            each.e2el - each.ttft, abs=1e-4
        )
    assert run.timeline is not None
    tokens = sum(run.timeline.output_tokens_per_second) * run.timeline.seconds
    assert tokens == pytest.approx(run.num_output_tokens, rel=0.01)
    busy = sum(run.timeline.in_flight) * run.timeline.seconds
    assert busy == pytest.approx(sum(each.e2el for each in run.requests), rel=0.01)


def test_an_emptied_cache_holds_nothing_of_the_run_before(engine: AsyncEngine) -> None:
    requests = random_requests(2, 64, 2, seed=2, ids=IdRange.below(256))
    rates = [
        found.engine.prefix_hit_rate
        for empty in (True, False, True)
        if (found := run_workload(engine, requests, empty_cache=empty)).engine is not None
    ]
    assert rates[0] == rates[2] == 0.0 < rates[1]


def test_an_engine_that_dies_is_no_run_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    core = FakeCore(step_time=0.001)
    core.dies_at = 3
    monkeypatch.setattr(
        "paged.runtime.async_engine.load_engine", lambda config, **how: fake_engine(core)
    )
    engine = AsyncEngine()
    with pytest.raises(EngineDead, match="the device fell off"):
        run_workload(engine, [BenchRequest("ab", 2, 50)] * 2)
    engine.shutdown()


def test_a_workload_needs_requests(engine: AsyncEngine) -> None:
    with pytest.raises(ConfigError, match="at least one request"):
        run_workload(engine, [])


def test_a_result_is_read_as_it_was_written(run: RunResult, tmp_path: Path) -> None:
    result = BenchResult(command="serve", date=now(), model="tiny", runs=(run,))
    path = tmp_path / "result.json"
    write_result(result, path)
    assert read_result(path) == result


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "no result of `paged bench`"),
        ("{}", f'it has no "{KEY}"'),
        (json.dumps({KEY: {"version": 99}}), "version 99, this Paged reads 1"),
        (json.dumps({KEY: {"version": 1, "command": 3}}), "broken result"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=told):
        read_result(path)


def test_times_are_milliseconds() -> None:
    times = Times.of([0.001, 0.002, 0.003, 0.006])
    assert times is not None
    assert (times.count, times.mean, times.p50, times.curve[0], times.curve[100]) == (
        *(4, 3.0, 2.5),
        *(1.0, 6.0),
    )
    assert Times.of([]) is None
