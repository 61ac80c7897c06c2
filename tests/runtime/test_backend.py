"""The choice of attention: refused where it cannot run, and said where it is not the fastest."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from paged.cache import KV_DTYPES, CacheSpec
from paged.models.loading import ModelSource
from paged.models.mesh import TENSOR
from paged.models.quantized import made_on_load
from paged.models.registry import get_family, model_config
from paged.models.weights import param_shapes
from paged.runtime import setup
from paged.runtime.backend import choose_backend, slower_paths
from paged.runtime.buckets import Buckets
from paged.runtime.errors import ConfigError
from paged.runtime.steps import StepShapes
from tests.runtime.test_core import make_core, source

__all__ = ["source"]

CPU: Any = SimpleNamespace(platform="cpu", device_kind="cpu")


def gpu(capability: str) -> Any:
    return SimpleNamespace(
        platform="gpu", compute_capability=capability, device_kind="NVIDIA Something"
    )


@pytest.mark.parametrize(
    ("wanted", "device", "chosen"),
    [
        ("auto", CPU, "xla"),
        ("auto", gpu("7.5"), "xla"),
        ("auto", gpu("8.9"), "triton"),
        ("auto", gpu("9.0"), "mosaic"),
        ("xla", gpu("9.0"), "xla"),
        ("triton", gpu("9.0"), "triton"),
        ("triton", gpu("12.0"), "triton"),
        ("mosaic", gpu("9.0"), "mosaic"),
    ],
)
def test_what_a_device_can_run_is_chosen(wanted: str, device: Any, chosen: str) -> None:
    assert choose_backend(wanted, device) == chosen


@pytest.mark.parametrize(
    ("wanted", "device", "message"),
    [
        ("triton", CPU, r"8\.0 or above, and this is a CPU\. Use xla"),
        ("mosaic", CPU, r"9\.0, and this is a CPU\. Use xla"),
        ("triton", gpu("7.5"), r"8\.0 or above, and this is NVIDIA Something, of 7\.5\. Use xla"),
        ("mosaic", gpu("8.0"), r"Hopper.* this is NVIDIA Something, of 8\.0\. Use triton"),
        ("mosaic", gpu("10.0"), r"Hopper.* this is NVIDIA Something, of 10\.0\. Use triton"),
    ],
)
def test_what_it_cannot_is_refused_with_what_works(wanted: str, device: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend(wanted, device)


def paths(
    capability: str,
    *,
    wanted: str = "auto",
    dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    head_dim: int = 128,
    heads: int = 8,
    experts: dict[str, int] | None = None,
    latent_rank: int | None = None,
    quantization: str | None = None,
    devices: int = 1,
) -> str:
    """What a model would be told on a GPU, in one line; it has experts if they are given."""
    size = 64 if quantization is None else 256
    model = model_config(
        {
            "architectures": ["LlamaForCausalLM" if experts is None else "Qwen3MoeForCausalLM"],
            **(experts or {}),
            "hidden_size": size,
            "intermediate_size": size,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": 1,
            "head_dim": head_dim,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
        }
    )
    cache = CacheSpec(1, 2, 16, 1, head_dim, KV_DTYPES[kv_dtype], latent_rank=latent_rank)
    backend = choose_backend(wanted, gpu(capability))
    family = get_family(model.architecture)
    shapes = StepShapes(family, model, cache, Buckets.make(1, 1), 64, backend)
    if quantization is not None:
        model = replace(model, quantization=made_on_load(quantization))
    mesh = None if devices == 1 else AbstractMesh((devices,), (TENSOR,))
    params = param_shapes(family.specs(model), jnp.dtype(dtype), mesh)
    return "; ".join(slower_paths(shapes, jnp.dtype(dtype), gpu(capability), params))


LITE = {"heads": 16, "head_dim": 576, "latent_rank": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0"])
def test_the_fastest_way_is_not_worth_a_word(capability: str) -> None:
    assert paths(capability) == ""


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
def test_pages_of_8_bits_are_read_the_fastest_way(kv_dtype: str) -> None:
    assert paths("9.0", kv_dtype=kv_dtype) == ""


def test_experts_are_multiplied_one_by_one_on_hopper() -> None:
    assert paths("9.0", experts=EXPERTS) == ""
    assert "every expert: our kernel needs a Hopper GPU" in paths("8.0", experts=EXPERTS)
    odd = paths("9.0", experts={**EXPERTS, "moe_intermediate_size": 96})
    assert "multiples of 64, not bfloat16 [64, 2, 96], bfloat16 [96, 64]" in odd


def test_weights_of_4_bits_that_devices_share_are_expanded() -> None:
    narrow: dict[str, Any] = {"heads": 2, "head_dim": 128, "quantization": "int4"}
    assert paths("9.0", **narrow) == ""
    said = paths("9.0", **narrow, devices=2)
    assert "groups are expanded at each product: our kernel takes weights of one device" in said


@pytest.mark.parametrize(
    ("capability", "model", "said"),
    [
        ("7.5", {}, "by xla: our kernels need an NVIDIA GPU of compute capability 8.0"),
        ("8.0", {"wanted": "xla"}, "by xla, as --attention-backend asks, not by triton"),
        ("9.0", {"wanted": "triton"}, "by triton, as --attention-backend asks, not by mosaic"),
        (
            "9.0",
            {"kv_dtype": "float32"},
            "not by mosaic: its pages are of 8 bits or of the model's",
        ),
        (
            "9.0",
            {"kv_dtype": "int8"},
            "of decode steps runs by triton, not by mosaic: it is slower",
        ),
        ("9.0", {"head_dim": 80}, "by triton, not by mosaic: it takes heads of 64"),
        ("9.0", {"heads": 24}, "of decode steps runs by triton, not by mosaic: it takes up to 16"),
        ("9.0", {"dtype": "float32", "kv_dtype": "float32"}, "takes 16-bit floats, not float32; w"),
        ("9.0", {"dtype": "float32", "kv_dtype": "float32"}, "weights are multiplied by XLA"),
        ("9.0", LITE, "of prompts runs by triton, not by mosaic: its pages hold keys and values"),
        ("9.0", LITE | {"heads": 128}, "attention runs by triton, not by mosaic: its pages hold"),
        ("9.0", LITE | {"head_dim": 640}, "attention runs by triton, not by mosaic: its pages ho"),
    ],
)
def test_slower_ways_are_explained(capability: str, model: dict[str, Any], said: str) -> None:
    assert said in paths(capability, **model)


def test_an_engine_says_it_once(
    source: ModelSource,
    compile_cache: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(setup, "slower_paths", lambda *_: ["one thing", "another"])
    with caplog.at_level(logging.WARNING):
        make_core(source, compile_cache).close()
    said = [record.getMessage() for record in caplog.records if "fastest" in record.getMessage()]
    assert said == ["Not the fastest way of cpu: one thing; another"]
