"""The estimate of what steps need, against programs that are compiled for a GPU ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from paged.attention import default_backend
from paged.models.loading import resolve_model
from paged.models.registry import get_family
from paged.models.weights import for_device, param_shapes
from paged.runtime.buckets import FEWEST_ROWS_ON_GPU, Buckets
from paged.runtime.division import DEVICE_RESERVE
from paged.runtime.planning.temporaries import step_memory_estimate
from paged.runtime.programs import all_jobs
from paged.runtime.sampler import SamplingMode
from paged.runtime.steps import StepShapes
from tests.paged import aot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
BF16 = jnp.dtype(jnp.bfloat16)


def shapes_of(name: str, gpu: aot.Gpu, rows: int, tokens: int) -> StepShapes:
    """Of a model's first two layers, which need as much as all of them."""
    whole = resolve_model(MODELS / name, load_format="dummy").config
    model = replace(whole, num_layers=2, windows=whole.windows[:2])
    buckets = Buckets.make(rows, tokens, fewest_rows=FEWEST_ROWS_ON_GPU)
    cache = model.cache_spec(4099, 16, BF16)
    backend = default_backend(gpu.device)
    return StepShapes(get_family(model.architecture), model, cache, buckets, 8192, backend)


@pytest.mark.parametrize(
    ("name", "gpu", "rows", "tokens", "program"),
    [
        ("llama-3.1-8b", aot.H200, 1024, 8192, "filtered"),
        ("llama-3.1-8b", aot.H200, 256, 2048, "logprobs"),
        ("llama-3.1-8b", aot.H200, 32, 8192, "forward"),
        ("qwen3-30b-a3b", aot.H200, 256, 8192, "forward"),
        ("llama-3.1-8b", aot.L40, 32, 8192, "forward"),
    ],
    ids=["logits", "adjusted", "activations", "experts", "before-hopper"],
)
def test_the_largest_program_needs_what_was_estimated(
    name: str, gpu: aot.Gpu, rows: int, tokens: int, program: str
) -> None:
    shapes = shapes_of(name, gpu, rows, tokens)
    params = for_device(param_shapes(shapes.family.specs(shapes.model), BF16), gpu.device)
    largest = {
        "filtered": ("sample", shapes.buckets.sampling[-1], SamplingMode.FILTERED),
        "logprobs": ("sample", shapes.buckets.sampling[-1], SamplingMode.LOGPROBS),
        "forward": ("forward", shapes.buckets.all()[0]),
    }
    job = dict(all_jobs(shapes, params))[largest[program]]
    compiled = aot.compile_for(gpu, job.function, *job.args, donate=job.donated, may_spill=True)
    memory = compiled.memory_analysis()
    assert memory is not None
    is_hopper = gpu is aot.H200
    estimate = step_memory_estimate(shapes, BF16, is_hopper=is_hopper) - DEVICE_RESERVE
    outputs = 2 * (tokens + shapes.buckets.sampling[-1]) * shapes.model.hidden_size * BF16.itemsize
    assert memory.temp_size_in_bytes == pytest.approx(estimate - outputs, rel=0.25)
