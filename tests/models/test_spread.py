"""Models that several devices share: as on one, with as few exchanges as there can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from paged.errors import ConfigError
from paged.models.config import ModelConfig
from paged.models.mesh import TENSOR
from paged.models.registry import get_family, model_config
from paged.models.spread import check_devices, spread_specs
from tests.models.harness import load_golden, one_golden_a_family
from tests.models.quantized.test_published import WEIGHT_ONLY
from tests.models.spread_cases import SIZES, Case, Found

# Of which numbers of devices can share the goldens as they are, the vocabulary of DeepSeek's apart.
QUICK = [Case("llama", 2, sized=False), Case("llama", 4, sized=False), Case("llama", 8)]
GOLDENS = [Case("qwen2", 2, sized=False), Case("deepseek_v2_lite", 2, sized=False)]
MIXTURES = [Case("gpt_oss", 2), Case("qwen2_moe", 4), Case("mixtral", 8), Case("deepseek_v3", 8)]
REFUSED = ("olmo2", "olmo2_bias_tied")
OTHERS = [
    *(Case(name, 2) for name in one_golden_a_family() if name not in REFUSED),
    *(Case(name, 8) for name in ("llama", "gemma3", "cohere_qk_norm_bias_untied", "phi")),
    *(Case("llama_wide", 2, quantization=name) for name in ("fp8", "int8", "int4")),
]
FEWER_BITS = [
    *(Case("llama_wide", 2, published=name) for name in ("gptq-asymmetric", "awq", "fp8-tiles")),
    *(Case("llama_wide", 2, published=name) for name in ("packed", "integers-alone", "fp8")),
    *(Case(name, 2, quantization="int4") for name in ("mixtral", "gpt_oss")),
    Case("deepseek_v3", 2, quantization="int8"),
    *(Case("llama", 2, kv_dtype=name) for name in ("fp8", "int8")),
]
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
}


def found(*cases: Case) -> list[Found]:
    """What each case did, in a process of their own."""
    argv = [sys.executable, "-m", "tests.models.spread_cases", json.dumps([*map(asdict, cases)])]
    done = subprocess.run(
        argv, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return [Found(**json.loads(line)) for line in done.stdout.splitlines()]


def check(case: Case, done: Found) -> None:
    layers = load_golden(case.golden)["config"]
    num_layers = layers.get("num_hidden_layers") or layers["num_layers"]
    shares_vocabulary = case.sized or layers["vocab_size"] % case.devices == 0
    # Quantised to 8 bits, activations have a scale on each device.
    rounds = case.quantization in ("fp8", "int8") or case.published == "fp8"
    assert done.same or rounds, case
    assert done.away < (0.1 if rounds else 2**-19), case
    assert done.from_golden is None or done.from_golden < 1e-4, case
    # Attention and MLP side by side are added up as one.
    assert done.all_reduces <= 2 * num_layers + shares_vocabulary, case
    assert done.others == shares_vocabulary, "logits are brought together once, for this test"
    assert done.copies == 0, case
    assert done.most < 1 / case.devices + 0.15, case


@pytest.mark.timeout(300)
def test_devices_answer_as_one_does() -> None:
    for case, done in zip(QUICK, found(*QUICK), strict=True):
        check(case, done)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [*GOLDENS, *MIXTURES, *OTHERS, *FEWER_BITS], ids=str)
def test_models_of_every_family_go_into_shares(case: Case) -> None:
    [done] = found(case)
    check(case, done)


def sized(name: str, **changes: Any) -> ModelConfig:
    data = load_golden(name)["config"]
    data |= {key: value for key, value in SIZES.items() if key in data}
    return model_config({**data, "head_dim": 8, **changes})


def refusal(config: ModelConfig, devices: int) -> str:
    specs = get_family(config.architecture).specs(config)
    with pytest.raises(ConfigError) as error:
        check_devices(specs, config, devices)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "devices", "words"),
    [
        ("llama", {}, 3, ["--tensor-parallel-size 3", "8 attention heads", "Use 1 or 2 or 4 or 8"]),
        ("llama", {"intermediate_size": 100}, 8, ["(mlp)", "100", "Use 1 or 2 or 4."]),
        ("llama", {"num_attention_heads": 12}, 6, ["4 key/value heads", "Use 1 or 2 or 4."]),
        ("mixtral", {"num_local_experts": 6}, 4, ["(experts)", "6", "Use 1 or 2."]),
        ("olmo2", {}, 2, ["all heads of its queries are normalised as one", "Use 1."]),
        (
            "llama_wide",
            {"quantization_config": WEIGHT_ONLY["gptq-ordered"][0]},
            2,
            ["an order of its own (desc_act or actorder)", "Use 1."],
        ),
    ],
)
def test_what_devices_cannot_share_is_told(
    name: str, changes: dict[str, Any], devices: int, words: list[str]
) -> None:
    said = refusal(sized(name, **changes), devices)
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize("name", ["llama", *REFUSED])
def test_one_device_is_never_refused(name: str) -> None:
    config = sized(name)
    check_devices(get_family(config.architecture).specs(config), config, 1)


def test_each_device_sees_its_share_of_the_heads() -> None:
    config = sized("llama")
    assert config.share(1) == config
    assert config.share(4) == replace(config, num_heads=2, num_kv_heads=1)
    assert config.share(8) == replace(config, num_heads=1, num_kv_heads=1)


def test_the_norm_of_a_key_head_is_where_the_head_is() -> None:
    config = sized("cohere_qk_norm_bias_untied")
    described = get_family(config.architecture).specs(config)
    check_devices(described, config, 8)
    mesh = AbstractMesh((8,), (TENSOR,))
    spec = spread_specs(described, config, mesh).layers[0].k_norm
    weights = np.arange(spec.parts[0].shape[0] * 8, dtype=np.float32).reshape(-1, 8)
    made = spec.assemble([jnp.asarray(weights)], jnp.dtype(jnp.float32))
    assert made.shape == spec.shape == (8, 8)
    assert spec.sharding_on(mesh).spec[0] == TENSOR
    assert (made == np.repeat(weights, 2, axis=0)).all()
