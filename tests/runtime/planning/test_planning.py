"""What plans say: what fits, what flags would change, what is a trap, and how it is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paged.http.cli import main
from paged.models.loading import ModelNotFoundError
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.planning import GPUS, Plan, Workload, find_gpu, plan
from paged.runtime.planning.levers import Lever, levers, remedies
from paged.runtime.planning.picture import GLYPHS, bar, shares_of, svg
from paged.runtime.planning.report import lever_table
from paged.runtime.planning.traps import warnings

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
LLAMA, LARGE, EXPERTS = (
    str(MODELS / name) for name in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b")
)
Capture = pytest.CaptureFixture[str]


def planned(model: str = LLAMA, gpu: str = "H200", **flags: Any) -> Plan:
    return plan(model, gpu, **{"max_model_len": 8192, **flags})


def test_all_of_the_memory_is_somewhere() -> None:
    made = planned()
    assert sum(shares_of(made).values()) == made.gpu.usable
    assert made.memory.weights == 2 * 8_030_261_248


def test_the_bar_leaves_no_share_out() -> None:
    made = planned(kv_offloading_size=8)
    there = {GLYPHS[name] for name, size in shares_of(made).items() if size}
    assert len(there) == len(GLYPHS)
    for width in (len(there), 60):
        text = bar(made, width)
        assert len(text) == width
        assert {*text} == there


def test_fewer_bits_hold_more_and_take_less_time() -> None:
    usual = planned()
    pages, weights = planned(kv_cache_dtype="fp8"), planned(quantization="fp8")
    assert pages.kv_cache_tokens == pytest.approx(2 * usual.kv_cache_tokens, rel=0.01)
    assert weights.kv_cache_tokens > usual.kv_cache_tokens
    assert weights.memory.weights < 0.6 * usual.memory.weights
    for changed in (pages, weights):
        assert changed.decode_step(128, 1024).expected < usual.decode_step(128, 1024).expected


def test_two_devices_share_weights_and_heads() -> None:
    one, two = planned(), planned(tensor_parallel_size=2)
    assert two.memory.weights == pytest.approx(one.memory.weights / 2, rel=0.01)
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert two.kv_cache_tokens > 2 * one.kv_cache_tokens


def test_weights_on_the_host_make_room_and_cost_time() -> None:
    usual, moved = planned(gpu="L40S"), planned(gpu="L40S", cpu_offload_gb=4)
    assert moved.kv_cache_tokens > usual.kv_cache_tokens
    assert moved.decode_step(1, 1024).expected > 2 * usual.decode_step(1, 1024).expected


def test_experts_are_read_as_far_as_they_are_chosen() -> None:
    made = planned(EXPERTS)
    few, many = (made.decode_step(batch, 16).floor for batch in (1, 256))
    assert many > 5 * few


def test_windows_bound_what_is_read(tmp_path: Path) -> None:
    config = json.loads((MODELS / "llama-3.1-8b" / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 1024}))
    made = planned(str(tmp_path))
    assert made.decode_step(64, 8192) == made.decode_step(64, 1024)


def test_a_request_alone_waits_less_than_the_last_of_many() -> None:
    made = planned(input_len=300, output_len=128, concurrency=64)
    assert made.concurrency == 64
    assert made.ttft_ms < made.burst_ttft_ms
    assert made.output_tokens_per_second == pytest.approx(128 * made.requests_per_second)


def test_gpus_have_what_a_plan_asks_for() -> None:
    assert {"B200", "H200", "H100", "A100", "A100-40GB", "L40S", "L4", "RTX-4090"} <= {*GPUS}
    for gpu in GPUS.values():
        assert 0.85 * gpu.memory < gpu.usable < 1.08 * gpu.memory
        assert (gpu.flops8 is not None) == (float(gpu.capability) >= 8.9)
        assert find_gpu(gpu.kind) is find_gpu(gpu.name) is gpu
    for name, meant in [
        *(("h200", "H200"), ("H100-80GB", "H100"), ("A100 SXM4 80GB", "A100")),
        *(("a100_40gb", "A100-40GB"), ("4090", "RTX-4090"), ("nvidia rtx 4090", "RTX-4090")),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
    ]:
        assert find_gpu(name).name == meant
    with pytest.raises(ConfigError, match="Did you mean H200"):
        find_gpu("H20")


def test_the_page_lists_the_gpus() -> None:
    page = (MODELS.parents[1] / "docs" / "planning.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for gpu in GPUS.values():
        assert any(row.startswith(f"| {gpu.name} | {gpu.usable / 2**30:.1f} |") for row in rows)


def test_every_lever_is_another_plan() -> None:
    made = levers(EngineConfig(model=LLAMA), find_gpu("H200"), Workload())
    assert len({each.flag for each in made}) == len(made) >= 8
    assert all(each.plan is not None for each in made)
    pages = next(each.plan for each in made if "--kv-cache-dtype" in each.flag)
    assert pages is not None
    assert pages.config.kv_cache_dtype == "fp8"
    old = levers(EngineConfig(model=LLAMA), find_gpu("A100"), Workload())
    assert "--kv-cache-dtype int8" in [each.flag for each in old]


def test_a_lever_that_cannot_be_says_why_in_whole_words() -> None:
    reason = "--kv-cache-dtype fp8 needs a GPU of capability 8.9 or above, and A100 has 8.0. Use"
    last = lever_table([Lever("now", planned()), Lever("--kv-cache-dtype fp8", None, reason)])
    assert last.endswith("no: --kv-cache-dtype fp8 needs a GPU of capability 8.9 or above, and ...")


def test_the_length_of_a_slip_of_the_finger_is_named() -> None:
    """And not the memory that its page tables would take."""
    with pytest.raises(ConfigError, match=r"4000000000 is greater than the model's own length"):
        plan(LLAMA, "H200", max_model_len=4_000_000_000)


def test_what_does_not_fit_is_told_what_would() -> None:
    with pytest.raises(ConfigError, match="No memory is left"):
        plan(LARGE, "H100")
    made = remedies(EngineConfig(model=LARGE), find_gpu("H100"), Workload())
    assert "--tensor-parallel-size 4" in [each.flag for each in made]
    assert all(each.plan is not None and each.plan.kv_cache_tokens > 0 for each in made)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"max_model_len": 512}, "more than --max-model-len 512"),
        ({"input_len": 200_000, "max_model_len": None}, "made for no more"),
        ({"max_model_len": None}, "113 times a typical request"),
        ({"concurrency": 2000}, "Of 2000 requests at once"),
        ({}, "--max-num-seqs 1024 is more than"),
        ({"gpu_memory_utilization": 0.97}, "leaves 4.19 GiB for the driver"),
        ({"gpu_memory_utilization": 0.4}, "unused unless something else"),
        ({"kv_cache_memory_bytes": 140 * 10**9}, "is not checked against the GPU"),
        ({"gpu_memory_utilization": 0.125}, "Pages get"),
        ({"gpu": "A100", "quantization": "fp8"}, "fp8"),
        ({"cpu_offload_gb": 4}, "copies"),
        ({"gpu": "T4", "quantization": "int4"}, "--dtype float16"),
        ({"dtype": "float32"}, "twice the memory"),
        ({"tensor_parallel_size": 16}, "share 8 key/value heads"),
        ({"tensor_parallel_size": 2, "gpu": "L40S"}, "no NVLink"),
        ({"tensor_parallel_size": 2}, "fits on one H200"),
        ({"max_num_batched_tokens": 16384}, "everyone who is decoding waits"),
        ({"max_num_batched_tokens": 256, "max_num_seqs": 64}, "first tokens come late"),
        ({"block_size": 128, "input_len": 100}, "wastes half a page"),
        ({"enable_prefix_caching": False}, "system prompts anew"),
        ({"gpu_memory_utilization": 0.125}, "two of them take turns"),
    ],
)
def test_traps_are_told(flags: dict[str, Any], word: str) -> None:
    assert word in "\n".join(warnings(planned(**flags)))


def test_a_step_has_no_longer_prompts_than_the_engine_takes() -> None:
    def milliseconds(max_model_len: int) -> int:
        flags: dict[str, Any] = {"max_num_batched_tokens": 65_536, "max_model_len": max_model_len}
        [found] = re.findall(r"65536 takes (\d+) ms", "\n".join(warnings(planned(**flags))))
        return int(found)

    assert milliseconds(2048) < 0.8 * milliseconds(65_536)


def test_a_sound_plan_has_no_warnings() -> None:
    assert warnings(planned(max_num_seqs=256, max_num_batched_tokens=8192)) == []


def run(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    status = main(["plan", *argv])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_command_tells_people(capsys: Capture, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    argv = (LLAMA, "--gpu", "h200", "--max-model-len", "8192", "--svg", str(picture))
    status, out, _ = run(capsys, *argv)
    assert status == 0
    for word in ("GPU KV cache size", "895,", "decode step, batch", "--kv-cache-dtype fp8", "! "):
        assert word in out
    texts = [node.text for node in ElementTree.parse(picture).iter() if node.tag.endswith("text")]
    assert "--tensor-parallel-size 2" in texts


def test_of_a_long_path_the_picture_has_the_end() -> None:
    made = planned()
    path = f"/{'folder/' * 30}llama"
    picture = svg(replace(made, source=replace(made.source, name=path)), [])
    [title] = re.findall(r'bold">(….*/llama on 1 x H200)</text>', picture)
    assert len(title) < 90


def test_the_command_tells_programs(capsys: Capture) -> None:
    status, out, _ = run(capsys, LLAMA, "--gpu=H200", "--max-model-len=8192", "--json")
    told = json.loads(out)
    assert status == 0
    assert told["kv_cache_tokens"] == planned().kv_cache_tokens
    assert told["max_full_length_sequences"] == told["kv_cache_tokens"] // 8192
    assert told["decode_step_ms"] == pytest.approx(planned().decode_step_ms)
    assert sum(told["memory"][name] for name in shares_of(planned())) == told["memory"]["usable"]
    assert {"ttft_ms", "output_tokens_per_second", "levers", "warnings", "decode_steps"} <= {*told}


def test_a_command_line_of_serve_can_be_planned(capsys: Capture) -> None:
    argv = ("--host", "0.0.0.0", "--port", "8000", "--api-key", "k", "--swap-space", "4")
    served = ("--served-model-name", "llama", "--max-model-len", "4k", "--disable-log-requests")
    assert run(capsys, LLAMA, *argv, *served, "--gpu", "L40S", "--tp", "2")[0] == 0


def test_what_cannot_be_planned_is_one_line(capsys: Capture) -> None:
    for argv, word in [
        ((LLAMA,), "--gpu names the GPU"),
        ((LLAMA, "--gpu", "H200", "--input-len", "0"), "--input-len must be at least 1"),
        ((LLAMA, "--gpu", "H200", "--input-len", "1" * 20), "at most 16,777,216, got 11,111,111"),
        ((LLAMA, "--gpu", "H200", "-tp", "3"), "Use 1 or 2 or 4"),
        ((LLAMA, "--gpu", "H200", "--svg", "/no/such/folder/a.svg"), "--svg"),
        (("no/such-model", "--gpu", "H200"), "nothing is fetched here"),
    ]:
        status, _, err = run(capsys, *argv)
        assert status == 2
        assert word in err.splitlines()[-1]
    status, _, err = run(capsys, LARGE, "--gpu", "H100")
    assert status == 2
    assert err.startswith("What would fit on H100:")


def test_a_model_that_is_not_here_is_not_fetched() -> None:
    with pytest.raises(ModelNotFoundError, match="nothing is fetched here"):
        plan("no/such-model", "H200")
