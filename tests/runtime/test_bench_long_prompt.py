"""`benchmarks/long_prompt.py` on a tiny model."""

import json
from pathlib import Path

import pytest

from tests.runtime.benchmark import run_benchmark


@pytest.mark.slow
def test_every_case_is_told(tmp_path: Path) -> None:
    limits = ("--max-model-len=2048", "--max-num-seqs=4", "--max-num-batched-tokens=256")
    load = ("--tokens=1200", "--decoding=3", "--cases=256:0,256:64")
    run_benchmark("long_prompt", tmp_path, f"--json={tmp_path}/long.json", *load, *limits)
    whole, part = json.loads((tmp_path / "long.json").read_text())
    # Steps until its first token: a fifth part of 1,200 tokens each, less the others' own.
    assert 5 <= whole["steps"] <= 8
    assert 19 <= part["steps"] <= 22
    for result in (whole, part):
        assert 0 < result["before"]["p50"] <= result["before"]["longest"]
        assert 0 < result["during"]["p50"] <= result["during"]["longest"]
        assert result["ttft"] > 0
