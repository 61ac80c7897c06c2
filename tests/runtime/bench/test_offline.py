"""Throughput and latency runs on a tiny model with random weights."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged.http.cli import main
from paged.runtime.bench.latency import decode_seconds
from paged.runtime.bench.offline import EngineMeter
from paged.runtime.bench.results import EngineReport, read_result
from paged.runtime.errors import EngineDead
from paged.runtime.messages import EngineStats
from paged.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput

Bench = Callable[..., None]


def written(bench: Bench, tmp_path: Path, *argv: str) -> dict[str, Any]:
    """The JSON that a run writes."""
    path = tmp_path / "result.json"
    bench(*argv, "--output-json", path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_throughput_counts_every_token(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--num-prompts", "5", "--input-len", "24", "--output-len", "10"]
    result = written(bench, tmp_path, "throughput", *asked)
    assert result["num_requests"] == 5
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 50)
    assert result["total_num_tokens"] == 170
    assert result["tokens_per_second"] == pytest.approx(170 / result["elapsed_time"])
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["start_seconds"] > 0
    engine = result["engine"]
    assert engine["num_steps"] >= 3 * 10  # two at a time
    assert (engine["prefix_hit_rate"], engine["compiles_after_warmup"]) == (0.0, 0)
    [run] = read_result(tmp_path / "result.json").runs
    assert (run.num_completed, run.num_output_tokens) == (5, 50)
    assert set(run.times) == {"ttft", "tpot", "e2el", "queue"}
    line = f"Throughput: {5 / result['elapsed_time']:.2f} requests/s, "
    assert line in capsys.readouterr().out


def test_throughput_of_several_sequences_and_a_shared_prefix(bench: Bench, tmp_path: Path) -> None:
    """Through the asynchronous engine, which must count the same."""
    asked = ["--random-prefix-len", "64", "--n", "2", "--async-engine"]
    asked += ["--num-prompts", "4", "--input-len", "8", "--output-len", "6"]
    result = written(bench, tmp_path, "throughput", *asked)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (4 * 72, 4 * 2 * 6)
    assert result["engine"]["prefix_hit_rate"] > 0.5


def test_latency_runs_one_batch_again_and_again(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--batch-size", "2", "--input-len", "12", "--output-len", "8"]
    asked += ["--num-iters", "3", "--num-iters-warmup", "1"]
    result = written(bench, tmp_path, "latency", *asked)
    latencies = result["latencies"]
    assert len(latencies) == 3
    assert result["avg_latency"] == pytest.approx(sum(latencies) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == sorted(latencies)[1]
    assert result["engine"]["prefix_hit_rate"] == 0.0  # the same prompts, prefilled each time
    assert 0 < result["decode_step_ms"] < max(latencies) * 1000
    [run] = read_result(tmp_path / "result.json").runs
    assert run.times["e2el"].p50 == pytest.approx(1000 * result["percentiles"]["50"], abs=1e-3)
    assert "99% percentile latency: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("latency", "--num-iters-warmup"),
        ("serve", "--num-warmups"),
        ("throughput", "--random-prefix-len"),
        ("throughput", "--lognormal-sigma"),
    ],
)
def test_nothing_is_done_a_negative_number_of_times(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", command, f"{flag}=-3"])
    assert f"argument {flag}: must be at least 0" in capsys.readouterr().err


def output(first: float | None, last: float | None, num_tokens: int) -> RequestOutput:
    return RequestOutput(
        request_id="",
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[CompletionOutput(0, token_ids=[1] * num_tokens)],
        finished=True,
        num_cached_tokens=0,
        metrics=RequestMetrics(0.0, first_token_time=first, finished_time=last),
    )


def test_a_decode_step_is_timed_on_the_sequence_prefilled_last() -> None:
    early, late = output(1.0, 9.0, 5), output(3.0, 11.0, 5)
    assert decode_seconds([late, early]) == 2.0
    assert decode_seconds([output(1.0, 1.0, 1)]) == 0.0


def test_the_meter_tells_what_happened_meanwhile() -> None:
    now = EngineStats(num_steps=10, prefix_cache_queries=100, prefix_cache_hits=90)
    looked = threading.Event()

    def look() -> EngineStats:
        seen = now  # the next one is there as soon as this one was looked at
        if seen.num_running:
            looked.set()
        return seen

    with EngineMeter(look) as meter:
        now = EngineStats(num_running=1, kv_waste=0.25)
        assert looked.wait(30)
        now = EngineStats(
            num_steps=14, prefix_cache_queries=300, prefix_cache_hits=140, num_preemptions=2
        )
    assert meter.report == EngineReport(
        num_steps=4,
        prefix_hit_rate=0.25,
        num_preemptions=2,
        kv_waste=0.25,
        compiles_after_warmup=0,
    )


@pytest.mark.filterwarnings("error")  # which an exception in a thread is to pytest
@pytest.mark.parametrize("told", ["the device failed", None])
def test_an_engine_that_dies_is_told_once(told: str | None) -> None:
    """By what ran on it, or else by the meter."""
    looks, looked = iter([EngineStats()]), threading.Event()

    def look() -> EngineStats:
        for stats in looks:
            return stats
        looked.set()
        raise EngineDead("no more steps")

    def measure() -> None:
        with EngineMeter(look):
            assert looked.wait(30)
            if told:
                raise EngineDead(told)

    with pytest.raises(EngineDead, match=told or "no more steps"):
        measure()


def test_a_run_too_short_to_look_at_has_no_waste() -> None:
    with EngineMeter(EngineStats) as meter:
        pass
    assert meter.report.kv_waste is None
    assert "KV waste not seen" in next(meter.report.lines())
