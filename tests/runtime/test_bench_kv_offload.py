"""`benchmarks/kv_offload.py` on a tiny model."""

import json
from pathlib import Path

import pytest

from tests.runtime.benchmark import run_benchmark


@pytest.mark.slow
def test_every_case_is_told(tmp_path: Path) -> None:
    limits = ("--max-model-len=256", "--max-num-seqs=4", "--max-num-batched-tokens=64")
    memory = ("--kv-cache-memory-gib=0.0004", "--kv-offloading-size=0.002")
    load = ("--conversations=10", "--streams=2", "--prompt=100", "--turn=20", "--output=8")
    flags = (*limits, *memory, *load, "--seconds=2")
    run_benchmark("kv_offload", tmp_path, f"--json={tmp_path}/offload.json", *flags)
    *transfers, without, with_, loaded = json.loads((tmp_path / "offload.json").read_text())
    assert [each["direction"] for each in transfers] == ["to the host", "from the host"]
    assert all(each["gb_per_s"] > 0 and 0 < each["busy"] <= 1 for each in transfers)
    for result in (without, with_, loaded):
        assert result["turns"] > 0
        assert 0 < result["ttft_ms"][0] <= result["ttft_ms"][1]
        assert result["compiles"] == 0
    assert (without["on_host"], without["gb_saved"], without["gb_loaded"]) == (0, 0, 0)
    assert loaded["on_host"] > 0.3
    assert loaded["computed"] < 0.4 < without["computed"]
