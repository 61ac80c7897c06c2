"""The comparison with vLLM: its floors, its table, and a run of everything on a tiny model."""

import json
from pathlib import Path

import pytest

from benchmarks.against_vllm import Book, keep_offline, table
from benchmarks.floors import Ceilings, ModelWork, Request, floor_seconds
from tests.runtime.benchmark import ROOT, run_benchmark

LLAMA = ModelWork.of(ROOT / "benchmarks/models/llama-3.1-8b")
CARD = Ceilings(bytes_per_second=4.089e12, flop_per_second=700e12)


def test_work_of_llama_8b() -> None:
    assert pytest.approx(13.96e9, rel=1e-3) == LLAMA.token_flop
    assert pytest.approx(15.0e9, rel=1e-3) == LLAMA.weight_bytes
    assert LLAMA.kv_bytes == 131_072


@pytest.mark.parametrize(("batch", "milliseconds"), [(8, 3.95), (32, 4.79), (128, 8.13)])
def test_floor_of_a_decode_step_is_its_bytes(batch: int, milliseconds: float) -> None:
    step = [Request(1088, 2, cached=1088)] * batch
    assert floor_seconds(LLAMA, CARD, step) == pytest.approx(milliseconds / 1e3, rel=5e-3)


@pytest.mark.parametrize(("batch", "experts"), [(1, 8), (8, 51.6), (256, 128)])
def test_a_step_reads_the_experts_that_are_used(batch: int, experts: float) -> None:
    work = ModelWork.of(ROOT / "benchmarks/models/qwen3-30b-a3b")
    assert work.expert_bytes == 2 * 48 * 3 * 2048 * 768
    used = (work.step_bytes(batch) - work.weight_bytes) / work.expert_bytes
    assert used == pytest.approx(experts, rel=5e-3)
    # Three thousand million parameters are active, as its name says.
    assert (work.token_flop + work.logits_flop) / 2 == pytest.approx(3.04e9, rel=0.01)


def test_floor_of_prompts_is_their_products() -> None:
    seconds = floor_seconds(LLAMA, CARD, [Request(300, 1)] * 1024)
    assert seconds == pytest.approx(1024 * 300 * 13.96e9 / 700e12, rel=0.02)


def test_cached_tokens_are_not_computed() -> None:
    whole = floor_seconds(LLAMA, CARD, [Request(2112, 1)])
    ending = floor_seconds(LLAMA, CARD, [Request(2112, 1, cached=2048)])
    assert ending == pytest.approx(whole * 64 / 2112, rel=0.1)


def test_table_tells_who_is_better(tmp_path: Path) -> None:
    book = Book(tmp_path, LLAMA, CARD)
    keep_offline(book, {"batch": 32, "context": 1088, "decode_step_ms": 5.3}, cold=False)
    book.set("serve 64", 60.0)
    _, _, decode, serve = table(book)
    assert decode == "| decode step, batch 32 | ms | 5.10 | 5.30 | 4.79 | 0.90 | 6.36 | 1.20 |"
    assert serve == "| serving 300/128, 64 streams | requests/s | 60.0 | 60.0 |  |  | 50.0 | 1.20 |"


def test_every_row_of_the_yardstick_has_a_name_of_its_own() -> None:
    rows = json.loads((ROOT / "benchmarks/yardstick.json").read_text())["rows"]
    assert len({row["name"] for row in rows}) == len(rows)


@pytest.mark.slow
def test_everything_runs(tmp_path: Path) -> None:
    limits = ("--max-model-len=4096", "--max-num-seqs=8", "--max-num-batched-tokens=512")
    sizes = ("--batches=1", "--workloads=D", "--streams=64", "--seconds=200")
    run_benchmark("against_vllm", tmp_path, f"--out={tmp_path}/out", *limits, *sizes)
    figures = json.loads((tmp_path / "out/figures.json").read_text())["figures"]
    expected = {"decode 1", "D", "serve 64", "ttft 64", "start cold", "server warm", "kv tokens"}
    assert expected < figures.keys()
    assert figures["compiles"] == 0
