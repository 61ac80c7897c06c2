"""`benchmarks/serving_path.py`: a short run over real sockets."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--text",)])
def test_the_cost_of_a_chunk_is_told_of_each_process(more: tuple[str, ...]) -> None:
    command = ("benchmarks/serving_path.py", "--streams=4", "--step-ms=2", "--rounds=1", *more)
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, check=True, timeout=100, capture_output=True
    )
    lines = run.stdout.decode().splitlines()
    assert "chunks/s" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["server", "engine", "client"]
