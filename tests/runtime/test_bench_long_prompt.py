"""`benchmarks/long_prompt.py` on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.test_bench_host_time import ROOT, TINY


@pytest.mark.slow
def test_every_case_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    limits = ("--max-model-len=2048", "--max-num-seqs=4", "--max-num-batched-tokens=256")
    files = (f"--compile-cache-dir={tmp_path}/cache", f"--json={tmp_path}/long.json")
    command = ("benchmarks/long_prompt.py", str(tmp_path), "--tokens=1200", "--decoding=3")
    cases = "--cases=256:0,256:64"
    subprocess.run(
        [sys.executable, *command, cases, *limits, *files], cwd=ROOT, check=True, timeout=280
    )
    whole, part = json.loads((tmp_path / "long.json").read_text())
    # Steps until its first token: a fifth part of 1,200 tokens each, less the others' own.
    assert 5 <= whole["steps"] <= 8
    assert 19 <= part["steps"] <= 22
    for result in (whole, part):
        assert 0 < result["before"]["p50"] <= result["before"]["longest"]
        assert 0 < result["during"]["p50"] <= result["during"]["longest"]
        assert result["ttft"] > 0
