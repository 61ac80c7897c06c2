"""Engines whose model is cut into stages, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.setup import claim_devices
from tests.models.harness import load_golden, write_checkpoint

ENVIRONMENT = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("golden", "sizes"),
    [("llama", ["2x1", "2x2"]), ("gemma3", ["3x1"]), ("deepseek_v3", ["2x2"])],
)
def test_stages_answer_as_one_device_does(golden: str, sizes: list[str], tmp_path: Path) -> None:
    """Also where windows differ, where the head is the embedding, and for latents."""
    folder = write_checkpoint(tmp_path, load_golden(golden))
    argv = [sys.executable, "-m", "tests.runtime.staged_engine", str(folder), golden, *sizes]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    one, *staged = json.loads(done.stdout)
    assert one["greedy"] == load_golden(golden)["greedy"]
    assert len(staged) == len(sizes)
    sums = one.pop("sums")
    for each in staged:
        assert each.pop("sums") == pytest.approx(sums, abs=1e-3)
        assert each == one
    assert one["compiles"] == 0


def test_more_stages_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="-size 64 needs 64 devices in each process, and JAX f"):
        claim_devices(EngineConfig(pipeline_parallel_size=64))


def test_hosts_that_have_not_been_joined_are_refused() -> None:
    with pytest.raises(ConfigError, match="--nnodes is for `paged serve`"):
        claim_devices(EngineConfig(nnodes=2, tensor_parallel_size=2))
