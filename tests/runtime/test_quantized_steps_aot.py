"""Whole steps with quantised weights, compiled for a GPU on any machine: nothing large is made."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paged.cache import CacheSpec, PagedKVCache
from paged.models.quantized import made_on_load, quantized
from paged.models.registry import get_family, model_config
from paged.models.weights import for_device, param_shapes
from paged.runtime.buckets import Bucket, Buckets
from paged.runtime.programs import all_jobs
from paged.runtime.sampler import SamplingMode
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
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }
)
BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(scope="module")
def shapes() -> StepShapes:
    """Of the most rows and tokens of a step."""
    cache = CacheSpec(1, 4099, 16, MODEL.num_kv_heads, MODEL.head_dim, BF16)
    family = get_family(MODEL.architecture)
    return StepShapes(family, MODEL, cache, Buckets.make(1024, 8192), 8192, "mosaic")


def params_of(shapes: StepShapes, name: str, excluded: list[str]) -> Any:
    """Shapes of weights that are made of a kind."""
    specs = quantized(shapes.family.specs(MODEL), made_on_load(name, excluded))
    return for_device(param_shapes(specs, BF16), aot.H200.device)


@pytest.mark.parametrize("name", ["fp8", "int4"])
@pytest.mark.parametrize(
    "bucket", [Bucket(32, 32, True), Bucket(8192, 1024, False)], ids=["32", "mixed"]
)
def test_a_step_takes_no_more_memory_than_with_plain_weights(
    bucket: Bucket, name: str, shapes: StepShapes
) -> None:
    program = aot.compile_for_h200(
        functools.partial(forward, shapes=shapes, bucket=bucket),
        params_of(shapes, name, ["lm_head"]),
        PagedKVCache.shapes(shapes.cache),
        jax.eval_shape(shapes.slot_state),
        jax.ShapeDtypeStruct((shapes.layout(bucket).size,), jnp.int32),
        donate=(1, 2),
    )
    text = program.as_text()
    assert text is not None
    assert not re.findall(r"= \w+\[\d+,[\d,]+\]\S* (?:copy|transpose)\(", text)
    report = program.memory_analysis()
    assert report is not None
    # The widest activations, twice, and what the attention of a few rows takes: as of plain ones.
    widest = bucket.num_tokens * 2 * MODEL.intermediate_size * BF16.itemsize
    assert report.temp_size_in_bytes < 2 * widest + 32 * 2**20


def test_sampling_takes_little_more_memory_than_logits_of_narrow_weights(
    shapes: StepShapes,
) -> None:
    """As with plain ones: a vocabulary of 4 bits that is written out takes a GiB."""
    rows = shapes.buckets.sampling[-1]
    job = dict(all_jobs(shapes, params_of(shapes, "int4", [])))[
        "sample", rows, SamplingMode.FILTERED
    ]
    report = aot.compile_for_h200(job.function, *job.args, donate=job.donated).memory_analysis()
    assert report is not None
    assert report.temp_size_in_bytes < 1.3 * rows * MODEL.vocab_size * 4
