"""Throughput and latency runs on a tiny model with random weights."""

import argparse
import json
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paged.runtime.bench.arguments import add_arguments, run
from paged.runtime.bench.latency import decode_seconds
from paged.runtime.bench.offline import EngineMeter
from paged.runtime.bench.results import EngineReport
from paged.runtime.config import EngineConfig
from paged.runtime.messages import EngineStats
from paged.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def engine_flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 2**20,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "compile_cache_dir": str(tmp_path_factory.mktemp("jit")),
    }


def bench(flags: dict[str, Any], tmp_path: Path, *argv: str) -> dict[str, Any]:
    """The JSON that a run writes."""

    def add_engine_flags(parser: argparse.ArgumentParser) -> None:
        for each in fields(EngineConfig):
            name = f"--{each.name.replace('_', '-')}"
            parser.add_argument(name, default=flags.get(each.name, each.default))

    parser = argparse.ArgumentParser()
    add_arguments(parser, add_engine_flags)
    path = tmp_path / "result.json"
    args = [*argv, "--output-json", str(path), "--disable-tqdm"]
    assert run(parser.parse_args(args)) == 0
    return json.loads(path.read_text())


def test_throughput_counts_every_token(
    engine_flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--num-prompts", "5", "--input-len", "24", "--output-len", "10"]
    result = bench(engine_flags, tmp_path, "throughput", *asked)
    assert result["num_requests"] == 5
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 50)
    assert result["total_num_tokens"] == 170
    assert result["tokens_per_second"] == pytest.approx(170 / result["elapsed_time"])
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["start_seconds"] > 0
    engine = result["engine"]
    assert engine["num_steps"] >= 3 * 10  # two at a time
    assert (engine["prefix_hit_rate"], engine["compiles_after_warmup"]) == (0.0, 0)
    line = f"Throughput: {5 / result['elapsed_time']:.2f} requests/s, "
    assert line in capsys.readouterr().out


def test_throughput_of_several_sequences_and_a_shared_prefix(
    engine_flags: dict[str, Any], tmp_path: Path
) -> None:
    """Through the asynchronous engine, which must count the same."""
    asked = ["--random-prefix-len", "64", "--n", "2", "--async-engine"]
    asked += ["--num-prompts", "4", "--input-len", "8", "--output-len", "6"]
    result = bench(engine_flags, tmp_path, "throughput", *asked)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (4 * 72, 4 * 2 * 6)
    assert result["engine"]["prefix_hit_rate"] > 0.5


def test_latency_runs_one_batch_again_and_again(
    engine_flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--batch-size", "2", "--input-len", "12", "--output-len", "8"]
    asked += ["--num-iters", "3", "--num-iters-warmup", "1"]
    result = bench(engine_flags, tmp_path, "latency", *asked)
    latencies = result["latencies"]
    assert len(latencies) == 3
    assert result["avg_latency"] == pytest.approx(sum(latencies) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == sorted(latencies)[1]
    assert result["engine"]["prefix_hit_rate"] == 0.0  # the same prompts, prefilled each time
    assert 0 < result["decode_step_ms"] < max(latencies) * 1000
    assert "99% percentile latency: " in capsys.readouterr().out


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
        if now.num_running:
            looked.set()
        return now

    with EngineMeter(look) as meter:
        now = EngineStats(num_running=1, kv_waste=0.25)
        assert looked.wait(10)
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


def test_a_run_too_short_to_look_at_has_no_waste() -> None:
    with EngineMeter(EngineStats) as meter:
        pass
    assert meter.report.kv_waste is None
    assert "KV waste not seen" in next(meter.report.lines())
