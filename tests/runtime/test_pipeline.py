"""Engines whose model is cut into stages, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.setup import claim_devices
from tests.models.harness import load_golden
from tests.runtime.spread_engine import asked_apart


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("golden", "flags", "sizes"),
    [
        ("llama", {}, ["2x1", "2x2"]),
        ("gemma3", {}, ["3x1"]),
        ("deepseek_v3", {}, ["2x2"]),
        ("llama_wide", {"quantization": "int4", "kv_cache_dtype": "fp8"}, ["2x2"]),
        ("mixtral", {"quantization": "fp8", "kv_cache_dtype": "int8"}, ["2x1"]),
    ],
)
def test_stages_answer_as_one_device_does(
    golden: str, flags: dict[str, Any], sizes: list[str], tmp_path: Path
) -> None:
    """Also where windows differ, where the head is the embedding, for latents and fewer bits."""
    room = {"kv_cache_memory_bytes": 2**19, "max_num_seqs": 3}
    one, *staged = asked_apart(tmp_path, golden, flags | room, *sizes)
    if not flags:
        assert one["tokens"][0] == load_golden(golden)["greedy"]
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
