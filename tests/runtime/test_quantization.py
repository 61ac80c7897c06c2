"""The flag --quantization: what the engine loads, counts and tells of."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from paged.models.quantized import ChannelScaled, GroupScaled, TileScaled, expanded_weights
from paged.models.quantized.channels import FLOAT8
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.engine import find_model
from tests.paged import aot
from tests.runtime.test_core import drain, make_request, prompt_of, tokens_of

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def configured(folder: Path, **flags: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        load_format="dummy",
        max_num_seqs=1,
        max_num_batched_tokens=4,
        kv_cache_memory_bytes=2**18,
        block_size=8,
        compile_cache_dir="",
        **flags,
    )


def test_an_engine_serves_dummy_weights_that_are_quantised(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(folder, quantization="int4")
    with caplog.at_level(logging.INFO):
        core = EngineCore(config, find_model(config), progress=False)
    try:
        core.add(make_request("0", prompt_of(20), max_tokens=8))
        assert len(tokens_of(drain(core))["0", 0]) == 8
        values = 64 * (64 + 64 + 64 + 3 * 128)  # of 4 bits, with 4 bytes for each group of 64
        kept = 4 * (2 * 199 * 64 + 3 * 64)
        assert core.memory.weights == pytest.approx(values / 2 + values / 64 * 4 + kept, rel=0.05)
    finally:
        core.close()
    assert "Quantized by int4: 0.0 MiB of weights; in float32: 0.1 MiB" in caplog.text


def test_the_default_leaves_heads_and_routers(folder: Path) -> None:
    quantization = find_model(configured(folder, quantization="fp8")).config.quantization
    assert quantization is not None
    for module in ("lm_head", "transformer.output_layer", "model.layers.0.mlp.gate"):
        assert quantization.scheme_for([module]) is None
    assert quantization.scheme_for(["model.layers.0.mlp.gate_proj"]) is not None


def test_other_patterns_take_the_place_of_the_default(folder: Path) -> None:
    config = configured(folder, quantization="fp8", quantization_exclude=("*.layers.0.*",))
    quantization = find_model(config).config.quantization
    assert quantization is not None
    assert quantization.scheme_for(["lm_head"]) is not None
    assert quantization.scheme_for(["model.layers.0.mlp.up_proj"]) is None


def test_a_gpu_tells_what_it_expands() -> None:
    one = jnp.zeros((64, 128), jnp.uint8)
    floats = one.astype(FLOAT8)
    weights = {
        "groups": GroupScaled(one, jnp.ones((1, 128), jnp.bfloat16), bits=4),
        "tiles": TileScaled(floats, jnp.ones((64, 1))),
        "floats": ChannelScaled(floats, jnp.ones(64)),
    }
    assert expanded_weights(weights, aot.H200.device) == []
    assert len(expanded_weights(weights, aot.A100.device)) == 3
    odd = {
        "groups": GroupScaled(one[:, :96], jnp.ones((1, 96), jnp.bfloat16), bits=4),
        "tiles": TileScaled(floats[:, :96], jnp.ones((64, 1))),
    }
    assert ["a multiple of 128" in text for text in expanded_weights(odd, aot.H200.device)] == [
        True
    ] * 2
    eight = GroupScaled(one, jnp.ones((1, 128)), bits=8)
    assert "8 bits" in expanded_weights(eight, aot.H200.device)[0]
    integers = ChannelScaled(one.astype(jnp.int8), jnp.ones(64))
    assert expanded_weights(integers, aot.A100.device) == []
