"""`benchmarks/http_overhead.py`: a short run, of a clock and of a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.http_overhead import quantile
from tests.runtime.benchmark import ROOT, run_benchmark

SIZE = ("--streams=4", "--rounds=1", "--seconds=200")


def check(figures: Path) -> None:
    told = json.loads(figures.read_text())
    assert 0 < told["http"] <= 1.1 * told["offline"]
    assert 0 < told["delivery_p50"] <= told["delivery_p99"]
    assert list(told["costs"]) == ["engine", "server", "client"]


@pytest.mark.slow
def test_a_clock(tmp_path: Path) -> None:
    command = ("benchmarks/http_overhead.py", "--step-ms=4", "--text", *SIZE)
    figures = tmp_path / "figures.json"
    subprocess.run([sys.executable, *command, f"--json={figures}"], cwd=ROOT, check=True)
    check(figures)


@pytest.mark.slow
def test_a_tiny_model(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--max-num-seqs=4", "--max-num-batched-tokens=64", "--kv-cache-memory-bytes=8m")
    flags = ("--max-model-len=512", f"--json={figures}", *sizes)
    run_benchmark("http_overhead", tmp_path, *SIZE, *flags)
    check(figures)


def test_quantiles_are_linear_within_a_bucket() -> None:
    counts = {1.0: 10.0, 2.0: 20.0, float("inf"): 20.0}
    assert [quantile(counts, share) for share in (0.25, 0.5, 0.75, 1.0)] == [0.5, 1.0, 1.5, 2.0]
