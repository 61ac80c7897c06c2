"""Plans against what engines on GPUs reported; nothing is compiled here.

The figures stand in benchmarks/RESULTS.md with their commands: Llama-3.1-8B's shape at commit
aa0743e, 2026-11-30; its 1,024 rows at 1badf55, its KV cache at 2daa48e; Qwen3-30B-A3B at 8e4f38d;
two GPUs and the 70B shape in the section on two GPUs of the first day. One H200 each time, or two
of one host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paged.runtime.planning import Plan, plan

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
CAPACITY, STEP = 0.03, 0.2


def planned(model: str, **flags: Any) -> Plan:
    return plan(str(MODELS / model), "H200", max_model_len=8192, **flags)


def test_the_kv_cache_has_as_many_tokens_as_the_engine_reported() -> None:
    assert planned("llama-3.1-8b").kv_cache_tokens == pytest.approx(895_472, rel=CAPACITY)


LLAMA = [
    *[(1, 1090, 4.24), (8, 1090, 4.57), (32, 1090, 5.50), (128, 1090, 9.43), (256, 1090, 15.83)],
    *[(64, 1088, 7.15), (1024, 364, 35.0)],
]
TWO = [(1, 1088, 4.34), (32, 1088, 5.47), (256, 1088, 10.62)]
FP8 = [(1, 1088, 21.99), (32, 1088, 25.74), (256, 512, 46.13)]
EXPERTS = [(1, 1088, 11.43), (32, 1088, 17.4), (256, 1088, 26.7)]


@pytest.mark.parametrize(
    ("model", "flags", "measured"),
    [
        ("llama-3.1-8b", {}, LLAMA),
        ("llama-3.1-8b", {"tensor_parallel_size": 2}, TWO),
        ("llama-3.1-70b", {"quantization": "fp8"}, FP8),
        ("qwen3-30b-a3b", {}, EXPERTS),
    ],
    ids=["8b", "two", "fp8", "experts"],
)
def test_decode_steps_take_as_long_as_they_did(
    model: str, flags: dict[str, Any], measured: list[tuple[int, int, float]]
) -> None:
    made = planned(model, **flags)
    for batch, context, milliseconds in measured:
        step = made.decode_step(batch, context)
        assert 1e3 * step.expected == pytest.approx(milliseconds, rel=STEP), batch
        assert step.floor < step.expected


@pytest.mark.parametrize(
    ("requests", "input_len", "output_len", "per_second"),
    [(1024, 300, 128, 11_369), (512, 1024, 512, 9_167), (64, 8000, 64, 281)],
)
def test_requests_give_as_many_tokens_as_they_did(
    requests: int, input_len: int, output_len: int, per_second: float
) -> None:
    lengths = {"input_len": input_len, "output_len": output_len}
    made = planned("llama-3.1-8b", concurrency=requests, **lengths)
    assert made.concurrency == requests
    assert made.output_tokens_per_second == pytest.approx(per_second, rel=STEP)


@pytest.mark.parametrize(
    ("streams", "per_second", "last_first_token"),
    [(64, 54.9, 510), (128, 72.5, 970), (256, 81.7, 1690)],
)
def test_streams_are_served_as_they_were(
    streams: int, per_second: float, last_first_token: float
) -> None:
    made = planned("llama-3.1-8b", input_len=300, output_len=128, concurrency=streams)
    assert made.requests_per_second == pytest.approx(per_second, rel=STEP)
    assert made.burst_ttft_ms == pytest.approx(last_first_token, rel=STEP)
