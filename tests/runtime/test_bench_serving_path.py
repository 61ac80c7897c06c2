"""`benchmarks/serving_path.py`: a short run over real sockets."""

import re
import subprocess
import sys

import pytest

from tests.runtime.benchmark import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "processes"),
    [
        ("--step-ms=2", ["server", "engine", "client"]),
        ("--text", ["server", "engine", "client"]),
        ("--no-engine-process", ["server", "client"]),
    ],
)
def test_the_cost_of_a_chunk_is_told_of_each_process(flag: str, processes: list[str]) -> None:
    command = ("benchmarks/serving_path.py", "--streams=4", "--step-ms=2", "--rounds=1", flag)
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, check=True, timeout=100, capture_output=True
    )
    lines = run.stdout.decode().splitlines()
    found = re.search(r"chunks/s .* device busy (\d+)%", lines[0])
    assert found
    assert 0 < int(found[1]) <= 105  # the clocks of a short run do not quite agree
    assert [line.split()[0] for line in lines[1:]] == processes
