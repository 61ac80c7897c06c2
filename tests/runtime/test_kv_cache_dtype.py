"""The flag --kv-cache-dtype: what fits in the same memory, and that the engine runs with it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from paged.models.loading import ModelSource, resolve_model
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.division import kv_dtype
from paged.runtime.errors import ConfigError
from tests.runtime.test_core import drain, make_request, prompt_of, tokens_of

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
    "initializer_range": 0.2,
}
PROMPTS = [prompt_of(length) for length in (5, 40, 70)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder: Path = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return resolve_model(folder, load_format="dummy")


def answers(source: ModelSource, **flags: Any) -> tuple[int, list[int]]:
    """Tokens that fit in the pages, and the greedy answers to all prompts in a row."""
    config = EngineConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=2**18,
        block_size=8,
        compile_cache_dir="",
        **flags,
    )
    core = EngineCore(config, source, progress=False)
    try:
        for i, prompt in enumerate(PROMPTS):
            core.add(make_request(f"{i}", prompt, max_tokens=8))
        tokens = tokens_of(drain(core))
        return core.memory.num_tokens, [token for key in sorted(tokens) for token in tokens[key]]
    finally:
        core.close()


@pytest.mark.slow
def test_pages_of_8_bits_hold_more_and_answer_much_the_same(source: ModelSource) -> None:
    exact_room, exact = answers(source, kv_cache_dtype="float32")
    for name, room in (("int8", 4 / (1 + 2 / 64)), ("fp8", 4)):
        fits, tokens = answers(source, kv_cache_dtype=name)
        assert fits / exact_room == pytest.approx(room, rel=0.03)
        same = sum(a == b for a, b in zip(tokens, exact, strict=True))
        assert same >= 0.7 * len(exact), f"{name} changed {len(exact) - same} of {len(exact)}"


def device(capability: str | None) -> jax.Device:
    """A GPU, or a CPU."""
    known = {"device_kind": "some device"}
    if capability is not None:
        known["compute_capability"] = capability
    return cast(jax.Device, SimpleNamespace(**known))


def test_floats_of_8_bits_want_hardware_that_reads_them() -> None:
    half = jnp.dtype(jnp.bfloat16)
    assert kv_dtype("auto", half, device("8.0")) == half
    assert kv_dtype("int8", half, device("8.0")) == jnp.int8
    assert kv_dtype("fp8_e5m2", half, device("8.0")) == jnp.float8_e5m2
    for capability in ("8.9", "9.0", "10.0", None):
        assert kv_dtype("fp8", half, device(capability)) == jnp.float8_e4m3fn
    with pytest.raises(ConfigError, match=r"8\.9 or above, and some device has 8\.0"):
        kv_dtype("fp8", half, device("8.0"))
