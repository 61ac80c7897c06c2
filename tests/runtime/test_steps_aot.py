"""Whole steps of an 8B model's layers, compiled for GPUs on any machine: nothing is copied."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from paged.attention import default_backend
from paged.cache import CacheSpec, PagedKVCache
from paged.groups import group_layers
from paged.models.config import ModelConfig
from paged.models.registry import get_family, model_config
from paged.models.weights import for_device, param_shapes
from paged.runtime.buckets import Bucket, Buckets
from paged.runtime.steps import StepShapes, forward
from tests.paged import aot

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

MODEL = model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }
)
BF16 = jnp.dtype(jnp.bfloat16)
MEBIBYTE = 2**20


@pytest.mark.parametrize("xla_products", [False, True])
@pytest.mark.parametrize(
    "bucket",
    [Bucket(1, 1, True), Bucket(32, 32, True), Bucket(256, 256, True), Bucket(8192, 1024, False)],
    ids=["1", "32", "256", "mixed"],
)
def test_a_step_copies_neither_pages_nor_weights(bucket: Bucket, xla_products: bool) -> None:
    cache = CacheSpec(MODEL.num_layers, 4099, 16, MODEL.num_kv_heads, MODEL.head_dim, BF16)
    check_copies(MODEL, cache, bucket, xla_products)


WINDOWED = model_config(
    {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    }
)


@pytest.mark.parametrize(
    "bucket", [Bucket(32, 32, True), Bucket(8192, 1024, False)], ids=["32", "mixed"]
)
def test_layers_of_two_groups_write_the_same_pages_in_place(bucket: Bucket) -> None:
    groups = group_layers(WINDOWED.windows, 8192)
    assert [len(group.layers) for group in groups] == [2, 2]
    cache = CacheSpec(2, 4099, 16, WINDOWED.num_kv_heads, WINDOWED.head_dim, BF16, groups)
    check_copies(WINDOWED, cache, bucket, xla_products=False)


def check_copies(model: ModelConfig, cache: CacheSpec, bucket: Bucket, xla_products: bool) -> None:
    """Compile a step and look for copies of pages, weights or activations."""
    family = get_family(model.architecture)
    shapes = StepShapes(family, model, cache, Buckets.make(1024, 8192), 8192, "mosaic")
    params = param_shapes(family.specs(model), BF16)
    program = aot.compile_for_h200(
        functools.partial(forward, shapes=shapes, bucket=bucket),
        params if xla_products else for_device(params, aot.H200.device),
        PagedKVCache.shapes(cache),
        jax.eval_shape(shapes.slot_state),
        jax.ShapeDtypeStruct((shapes.layout(bucket).size,), jnp.int32),
        donate=(1, 2),
    )
    text = program.as_text()
    assert text is not None
    moved = re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    large = [(kind, shape) for kind, shape in moved if len(shape.split(",")) > 1]
    assert not large, "the step moves whole arrays"
    assert " while(" not in text, "the step turns in a loop that the host must follow"
    report = program.memory_analysis()
    assert report is not None
    assert report.alias_size_in_bytes >= cache.bytes_per_page * cache.num_pages
    # The widest activations, twice, and what the attention of a few rows takes.
    widest = bucket.num_tokens * 2 * model.intermediate_size * BF16.itemsize
    assert report.temp_size_in_bytes < 2 * widest + 32 * MEBIBYTE


def test_a_step_over_latents_copies_neither_pages_nor_weights() -> None:
    """Of DeepSeek-V2-Lite: a layer with an MLP, and one with a mixture."""
    sizes = {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408}
    model = model_config(
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "vocab_size": 102400,
            "max_position_embeddings": 8192,
            **sizes,
        }
    )
    cache = CacheSpec(2, 4099, 16, 1, model.head_dim, BF16, latent_rank=model.latent_rank)
    family = get_family(model.architecture)
    shapes = StepShapes(family, model, cache, Buckets.make(1024, 8192), 8192, "mosaic")
    bucket = Bucket(32, 32, True)
    program = aot.compile_for_h200(
        functools.partial(forward, shapes=shapes, bucket=bucket),
        for_device(param_shapes(family.specs(model), BF16), aot.H200.device),
        PagedKVCache.shapes(cache),
        jax.eval_shape(shapes.slot_state),
        jax.ShapeDtypeStruct((shapes.layout(bucket).size,), jnp.int32),
        donate=(1, 2),
    )
    text = program.as_text()
    assert text is not None
    assert not re.findall(r"= \w+\[\d+,[\d,]+\]\S* (?:copy|transpose)\(", text)
    assert " while(" not in text
    report = program.memory_analysis()
    assert report is not None
    assert report.alias_size_in_bytes >= cache.bytes_per_page * cache.num_pages
    assert report.temp_size_in_bytes < 64 * MEBIBYTE


@pytest.mark.parametrize("gpu", [aot.A100, aot.L40], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("bucket", [Bucket(8, 8, True), Bucket(64, 8, False)], ids=["8", "mixed"])
def test_a_step_compiles_for_gpus_before_hopper(gpu: aot.Gpu, bucket: Bucket) -> None:
    cache = CacheSpec(MODEL.num_layers, 99, 16, MODEL.num_kv_heads, MODEL.head_dim, BF16)
    family = get_family(MODEL.architecture)
    backend = default_backend(gpu.device)
    shapes = StepShapes(family, MODEL, cache, Buckets.make(8, 64), 1024, backend)
    program = aot.compile_for(
        gpu,
        functools.partial(forward, shapes=shapes, bucket=bucket),
        for_device(param_shapes(family.specs(MODEL), BF16), gpu.device),
        PagedKVCache.shapes(cache),
        jax.eval_shape(shapes.slot_state),
        jax.ShapeDtypeStruct((shapes.layout(bucket).size,), jnp.int32),
        donate=(1, 2),
    )
    text = program.as_text()
    assert text is not None
    assert "xla.gpu.triton" in text
    assert "mosaic_gpu" not in text
