"""`benchmarks/host_time.py`, which wraps functions of the engine by their names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.bench.conftest import MODEL
from tests.runtime.fakes import write_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_host_time_sees_every_part_of_a_step(tmp_path: Path) -> None:
    model, found = (
        write_model(tmp_path, MODEL | {"max_position_embeddings": 2048}),
        tmp_path / "found.json",
    )
    program = (sys.executable, "benchmarks/host_time.py", str(model), "--no-device")
    sizes = (
        "--batches=4",
        "--max-model-len=2048",
        "--max-num-seqs=4",
        "--max-num-batched-tokens=64",
        f"--json={found}",
    )
    subprocess.run([*program, *sizes], cwd=ROOT, check=True, timeout=200)
    [result] = json.loads(found.read_text())
    assert {"schedule", "pack", "dispatch forward", "dispatch sample", "update"} < set(
        result["parts"]
    )
