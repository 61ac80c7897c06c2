"""The search over made-up engines, of which everything is known."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.runtime.bench.results import RunResult
from paged.runtime.tune.levers import LEVERS, Facts, Values
from paged.runtime.tune.search import Measure, Search, Trial, changed, gain

FACTS = Facts(num_requests=500, longest=700, on_gpu=True)
BASELINE: Values = {
    "max_model_len": 8192,
    "gpu_memory_utilization": 0.9,
    "kv_cache_memory_bytes": None,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": True,
    "kv_cache_dtype": "auto",
    "quantization": None,
}


def run_of(throughput: float, goodput: float | None = None) -> RunResult:
    return RunResult(
        name="run",
        duration=1.0,
        num_completed=1,
        num_failed=0,
        num_input_tokens=1,
        num_output_tokens=1,
        requests_per_second=1.0,
        output_tokens_per_second=throughput,
        total_tokens_per_second=throughput,
        goodput=goodput,
        goals={} if goodput is None else {"ttft": 1.0},
    )


def hill(best_seqs: int, best_tokens: int, prefix_gain: float, kv_gain: float) -> Measure:
    """An engine whose throughput has one top, which each flag has its own share in."""

    def measure(trial: Trial) -> Trial:
        values = trial.values
        seqs, tokens = values["max_num_seqs"], values["max_num_batched_tokens"]
        assert isinstance(seqs, int)
        assert isinstance(tokens, int)
        speed = 1000.0
        speed /= 1 + abs(math.log2(seqs / best_seqs))
        speed /= 1 + 0.3 * abs(math.log2(tokens / best_tokens))
        speed *= 1 + prefix_gain * bool(values["enable_prefix_caching"])
        speed *= 1 + kv_gain * (values["kv_cache_dtype"] == "fp8")
        return replace(trial, runs=(*trial.runs, run_of(speed)))

    return measure


def search(measure: Measure, max_runs: int = 100, facts: Facts = FACTS) -> Search:
    found = Search(measure, LEVERS, facts, margin=0.03, max_runs=max_runs)
    list(found.run(BASELINE))
    return found


def best(found: Search) -> Trial:
    return [verdict.trial for verdict in found.verdicts if verdict.is_kept][-1]


@given(
    st.sampled_from([8, 32, 64, 128, 256]),
    st.sampled_from([512, 2048, 4096, 16384]),
    st.sampled_from([-0.2, 0.0, 0.5]),
    st.sampled_from([-0.3, 0.2]),
)
def test_no_grid_of_the_same_size_finds_better(
    seqs: int, tokens: int, prefix_gain: float, kv_gain: float
) -> None:
    measure = hill(seqs, tokens, prefix_gain, kv_gain)
    found = search(measure)
    num_runs = sum(len(verdict.trial.runs) for verdict in found.verdicts)
    # As many points as there were runs, evenly over the same flags.
    points: list[Values] = [
        {"max_num_seqs": s, "max_num_batched_tokens": t, "kv_cache_dtype": d}
        for s, t, d in itertools.product(
            [16, 64, 256], [1024, 4096, 16384], ["auto", "fp8"][: max(1, num_runs // 9)]
        )
    ]
    grid = [measure(Trial({**BASELINE, **point})) for point in points]
    assert len(points) <= num_runs
    assert best(found).throughput >= 0.97 * max(each.throughput for each in grid)


def test_it_begins_with_the_baseline_and_says_what_changed() -> None:
    found = search(hill(128, 2048, 0.1, -0.5))
    first = found.verdicts[0]
    assert first.trial.values == BASELINE
    assert (first.trial.lever, first.is_kept, len(first.trial.runs)) == ("", True, 2)
    assert changed(best(found).values, BASELINE) == {"max_num_seqs": 128}
    assert not found.is_cut_short


def test_what_is_kept_has_run_twice_and_nothing_runs_a_third_time() -> None:
    found = search(hill(256, 8192, 0.0, 0.3))
    assert all(len(verdict.trial.runs) == 1 + verdict.is_kept for verdict in found.verdicts)
    tried = [tuple(verdict.trial.values.items()) for verdict in found.verdicts]
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize("seed", range(5))
def test_noise_gains_nothing(seed: int) -> None:
    rng = random.Random(seed)

    def measure(trial: Trial) -> Trial:
        return replace(trial, runs=(*trial.runs, run_of(100 * rng.uniform(0.98, 1.02))))

    assert best(search(measure)).values == BASELINE


def test_goals_count_before_tokens() -> None:
    def measure(trial: Trial) -> Trial:
        seqs = trial.values["max_num_seqs"]
        assert isinstance(seqs, int)
        return replace(trial, runs=(*trial.runs, run_of(seqs * 10.0, 1000 / seqs)))

    assert best(search(measure)).values["max_num_seqs"] == 1


def test_without_any_goal_met_tokens_lead_towards_them() -> None:
    one, other = (Trial(BASELINE, runs=(run_of(each, 0.0),)) for each in (200.0, 100.0))
    assert gain(one, other) == 1.0
    assert gain(replace(one, runs=(run_of(1.0, 0.5),)), other) == math.inf


def test_what_fails_is_told_and_never_kept() -> None:
    def measure(trial: Trial) -> Trial:
        if trial.values["max_num_seqs"] != 64:
            return replace(trial, error="no room")
        return replace(trial, runs=(*trial.runs, run_of(1.0)))

    found = search(measure)
    assert best(found).values == BASELINE
    failed = [verdict for verdict in found.verdicts if verdict.trial.error]
    assert {verdict.trial.values["max_num_seqs"] for verdict in failed} == {32, 128}
    assert all(verdict.gain == -1 for verdict in failed)


def test_a_baseline_that_fails_ends_it() -> None:
    found = search(lambda trial: replace(trial, error="no room"))
    assert [verdict.is_kept for verdict in found.verdicts] == [False]


def test_it_stops_after_the_runs_it_may_make() -> None:
    found = search(hill(256, 16384, 0.0, 0.5), max_runs=5)
    assert sum(len(verdict.trial.runs) for verdict in found.verdicts) in (5, 6)
    assert found.is_cut_short


@pytest.mark.parametrize(
    ("now", "facts", "changes"),
    [
        ({}, {}, {"max_model_len": 768}),
        ({"max_model_len": 700}, {}, {"gpu_memory_utilization": 0.93}),
        (
            {"gpu_memory_utilization": 0.95, "max_model_len": 768},
            {},
            {"max_num_seqs": 128, "max_num_batched_tokens": 2048},
        ),
        (
            {"kv_cache_memory_bytes": 2**30, "max_model_len": 768},
            {},
            {"max_num_seqs": 128, "max_num_batched_tokens": 2048},
        ),
        (
            {"kv_cache_memory_bytes": 2**30, "max_model_len": 768},
            {"on_gpu": False, "free_bytes": 2**33},
            {"kv_cache_memory_bytes": 2**31},
        ),
        (
            {"kv_cache_memory_bytes": 2**30, "max_model_len": 768, "max_num_seqs": 2048},
            {"on_gpu": False, "free_bytes": 2**31},
            {"max_num_seqs": 1024},
        ),
    ],
)
def test_the_first_change(now: Values, facts: dict[str, object], changes: Values) -> None:
    values, known = {**BASELINE, **now}, replace(FACTS, **facts)  # type: ignore[arg-type]
    moves = (move(values, known) for lever in LEVERS for move in lever.moves)
    assert next(change for change in moves if change) == changes


def test_more_sequences_than_tokens_take_more_tokens_along() -> None:
    values = {**BASELINE, "max_num_seqs": 64, "max_num_batched_tokens": 64}
    [change, *_] = [
        change for move in LEVERS[2].moves if (change := move(values, FACTS)) is not None
    ]
    assert change == {"max_num_seqs": 128, "max_num_batched_tokens": 128}


def test_weights_that_are_quantized_stay_so() -> None:
    stored = replace(FACTS, is_quantized=True)
    assert [move(BASELINE, stored) for move in LEVERS[-1].moves] == [None] * 3
