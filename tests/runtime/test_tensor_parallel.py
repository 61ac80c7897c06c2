"""Engines whose model several devices share, end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from paged.models.loading import resolve_model
from paged.runtime.about import cache_settings
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.errors import ConfigError
from paged.runtime.memory import MemoryPlan
from tests.models.harness import load_golden, write_checkpoint
from tests.models.test_spread import ENVIRONMENT
from tests.runtime.spread_engine import asked_apart

# Few pages, so that those of a prompt are on the host when it comes again.
PAGES: dict[str, Any] = {"kv_cache_memory_bytes": 2**16, "kv_offloading_size": 2**-10}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("golden", "flags"),
    [
        ("llama", PAGES),
        ("llama", PAGES | {"kv_cache_dtype": "int8", "kv_cache_memory_bytes": 2**14}),
        ("llama_wide", {"kv_cache_memory_bytes": 2**19, "quantization": "int4"}),
        ("deepseek_v3", PAGES),
    ],
    ids=("offloading", "int8-offloading", "int4", "latents-offloading"),
)
def test_two_devices_answer_as_one_does(golden: str, flags: dict[str, Any], tmp_path: Path) -> None:
    one, two = asked_apart(tmp_path, golden, flags, "1x2")
    if flags == PAGES:
        assert one["tokens"][0] == load_golden(golden)["greedy"]
    assert two.pop("sums") == pytest.approx(one.pop("sums"), abs=1e-3)
    for each in (one, two):
        assert (each.pop("loaded") > 0) == ("kv_offloading_size" in flags)
        assert each["tokens"][-1] == each["tokens"][0]
    assert two == one
    assert one["compiles"] == 0


_KEPT = """
import sys
import jax, numpy as np
from jax import numpy as jnp
from paged.runtime.compiler import Compiler
from paged.runtime.compiles import use_compile_cache
from paged.runtime.placement import Placement

use_compile_cache(sys.argv[1])
numbers = np.arange(6, dtype=np.int32)
for count in (1, 2, 8):
    devices = jax.devices()[:count]
    shape = jax.ShapeDtypeStruct(numbers.shape, jnp.int32)
    job = Placement.on(devices).job(lambda x: x + count, (shape,))
    with Compiler(0, devices) as compiler:
        [program] = compiler.programs(None, [((count,), job)]).values()
    assert (np.asarray(program(numbers)) == numbers + count).all()
"""


def test_programs_of_some_of_the_devices_are_kept_and_found(tmp_path: Path) -> None:
    """As a server on one or two GPUs of eight does at its second start."""
    for _ in range(2):
        argv = [sys.executable, "-c", _KEPT, str(tmp_path)]
        done = subprocess.run(
            argv, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert len(list(tmp_path.glob("*.program"))) == 3


def start(folder: Path, devices: int) -> EngineCore:
    source = resolve_model(write_checkpoint(folder, load_golden("llama")))
    return EngineCore(
        EngineConfig(tensor_parallel_size=devices, compile_cache_dir=""), source, progress=False
    )


def test_more_devices_than_there_are_are_refused(tmp_path: Path) -> None:
    there = len(jax.local_devices())
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size 64 .* finds {there} here"):
        start(tmp_path, 64)


def test_a_memory_report_counts_what_each_device_has() -> None:
    plan = MemoryPlan(
        budget=2**35,
        weights=2**33,
        state=0,
        steps=0,
        bytes_per_page=2**20,
        page_size=16,
        num_pages=1025,
        max_model_len=1024,
        pages_per_sequence=64,
        num_host_pages=1024,
        num_devices=2,
    )
    report = plan.report()
    assert "Memory of each of 2 devices:" in report
    assert "GPU KV cache size: 16,384 tokens" in report
    assert "Host KV cache size: 16,384 tokens (2.00 GiB)" in report
    assert plan.bytes_per_host_page == 2**21
    assert cache_settings(EngineConfig(), plan)["swap_space"] == "2.0"
