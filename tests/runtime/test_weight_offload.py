"""Weights in host memory: a step answers as if they were on the device, and holds few of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paged.models.loading import ModelSource, resolve_model
from paged.models.offloading import OnHost, choose_layers, freed
from paged.models.weights import PINNED
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.errors import ConfigError
from paged.runtime.weight_offload import cost_report, layers_on_host
from tests.models.harness import load_golden, write_checkpoint
from tests.runtime.test_core import (
    MODEL,
    make_core,
    make_request,
    prompt_of,
    run,
    source,
)

__all__ = ["source"]

pytestmark = pytest.mark.usefixtures("few_programs")

FLAGS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 96}
GIB = 2**30
METHODS = ("int8", "int4", "fp8")
LAYERS: dict[str, Any] = {"num_hidden_layers": 5}
GEMMA2: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 24}
LARGER: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
MODELS = {"llama": LAYERS, "gemma2": GEMMA2 | LAYERS | {"head_dim": 8}} | dict.fromkeys(
    METHODS, LARGER | LAYERS
)


def answers(core: EngineCore) -> dict[tuple[str, int], list[int]]:
    """Greedy ones and drawn ones, of prompts in chunks and of some at a time."""
    requests = [
        make_request(f"{i}", prompt_of(20 + 9 * i, seed=i), max_tokens=12) for i in range(4)
    ]
    return run(core, *requests)


def source_of(name: str, folder: Path) -> ModelSource:
    if name == "deepseek_v3":  # a dense layer, then mixtures
        return resolve_model(write_checkpoint(folder, load_golden(name)))
    (folder / "config.json").write_text(json.dumps(MODEL | MODELS[name]))
    found = resolve_model(folder, load_format="dummy")
    return found.quantized(name, ("lm_head",)) if name in METHODS else found


@pytest.mark.parametrize(
    ("name", "num_on_host"),
    [
        ("llama", 3),
        ("int8", 5),
        pytest.param("gemma2", 5, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 3, marks=pytest.mark.slow),
        pytest.param("int4", 3, marks=pytest.mark.slow),
        pytest.param("fp8", 3, marks=pytest.mark.slow),
    ],
)
def test_layers_on_the_host_change_no_token(
    name: str, num_on_host: int, tmp_path: Path, compile_cache: str
) -> None:
    """Also of quantised weights, of mixtures, of windows, and with host pages beside them."""
    found = source_of(name, tmp_path)
    core = make_core(found, compile_cache, **FLAGS)
    expected, before, name = answers(core), core.memory, core._runner.fingerprint()
    sizes = [
        sum(x.nbytes for x in jax.tree.leaves(layer))
        for layer in core._runner._device.params.layers
    ]
    core.close()

    wanted = sorted(sizes, reverse=True)[2:][: num_on_host - 2]
    flags = {"cpu_offload_gb": sum(wanted) / GIB, "kv_offloading_size": 2**-10}
    core = make_core(found, compile_cache, **FLAGS, **flags)
    on_host = [layer for layer in core._runner._device.params.layers if isinstance(layer, OnHost)]
    arrays = jax.tree.leaves(on_host)
    assert len(on_host) == num_on_host
    assert {x.sharding.memory_kind for x in arrays} == {PINNED}
    assert core.memory.weights_on_host == sum(x.nbytes for x in arrays)
    assert core.memory.weights == before.weights - core.memory.weights_on_host
    assert answers(core) == expected
    assert core._runner.fingerprint() == name
    assert core.stats().compiles_after_warmup == 0
    core.close()


def test_what_cannot_be_freed_is_refused(source: ModelSource, compile_cache: str) -> None:
    with pytest.raises(ConfigError, match=r"at most 0\.0 MiB .* its 2 layers .* Use at most 0\.00"):
        make_core(source, compile_cache, cpu_offload_gb=2**-20)
    layers = source.specs.layers * 4
    with pytest.raises(ConfigError, match=r"puts 3 layers of .* 0\.0 MiB of it left. Give less"):
        layers_on_host(2**-20, layers, jnp.dtype(jnp.float32), available=1)


def test_the_fewest_layers_are_chosen_evenly_spread() -> None:
    alike = [10] * 8
    assert freed(alike, choose_layers(alike, 1)) == 10, "two are on the device at a time"
    assert choose_layers(alike, 10) == {1, 4, 6}
    assert choose_layers(alike, 20) == {1, 3, 5, 7}
    assert choose_layers(alike, 60) == set(range(8))
    assert choose_layers(alike, 61) == set(range(8)), "and too few"
    assert freed([10, 40, 20, 30], range(4)) == 30


def test_a_start_tells_what_it_costs() -> None:
    text = cost_report(12, 32, 5 * GIB, 0.125)
    assert text.startswith("The weights of 12 of 32 layers (5.00 GiB) are in host memory")
    assert text.endswith(
        "at 42.9 GB/s. A step takes at least 125.0 ms: expect 8.0 tokens/s of a sequence, or less"
    )


@pytest.mark.parametrize("size", [-1.0, float("inf"), float("nan")])
def test_flags_that_make_no_sense_are_refused(size: float) -> None:
    with pytest.raises(ConfigError, match="--cpu-offload-gb must be at least 0 and finite, in GiB"):
        EngineConfig(cpu_offload_gb=size)
