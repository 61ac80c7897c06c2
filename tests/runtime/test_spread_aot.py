"""Steps that two GPUs share, compiled for them on any machine: what they exchange and copy."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.stages import Compiled

from paged.models.mesh import TENSOR
from paged.models.registry import get_family
from paged.models.spread import spread_shapes
from paged.models.weights import for_device
from paged.runtime.buckets import Bucket, Buckets
from paged.runtime.lowering import Job
from paged.runtime.placement import COPIED, Placement
from paged.runtime.sampler import SamplingMode
from paged.runtime.steps import StepShapes, forward, sample
from tests.paged import aot
from tests.runtime.test_steps_aot import BF16, MODEL

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
DEVICES = 2


def compiled(job: Job) -> Compiled:
    return jax.jit(job.function, donate_argnums=job.donated).lower(*job.args).compile()


def exchanges(text: str) -> list[str]:
    """What devices do together, each once."""
    kinds = r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    return re.findall(rf"= [^=\n]*? {kinds}(?:-start)?\(", text)


def test_a_step_adds_up_twice_a_layer_and_copies_nothing() -> None:
    mesh = aot.mesh_of(aot.H200, DEVICES, TENSOR)
    place, family = Placement(mesh), get_family(MODEL.architecture)
    own = MODEL.share(DEVICES)
    cache = own.cache_spec(4099, 16, BF16)
    buckets = Buckets.make(1024, 8192)
    shapes = StepShapes(family, own, cache, buckets, 8192, "mosaic", placement=place)
    params = spread_shapes(family.specs(MODEL), MODEL, BF16, mesh)
    params = for_device(params, aot.H200.device)
    slots, bucket = jax.eval_shape(shapes.slot_state), Bucket(32, 32, True)
    packed = jax.ShapeDtypeStruct((shapes.layout(bucket).size,), jnp.int32)
    job = place.job(
        partial(forward, shapes=shapes, bucket=bucket),
        (params, place.cache_shapes(cache), slots, packed),
        (1, 2),
        out=(place.pages, COPIED, COPIED),
    )
    step = compiled(job)
    text = step.as_text() or ""
    assert exchanges(text).count("all-reduce") == 2 * MODEL.num_layers + 1
    assert set(exchanges(text)) == {"all-reduce"}
    assert "paged_decode" in text, "our kernels run on each device's heads"
    assert not re.findall(r"= \w+\[\d+,[\d,]+\]\S* (?:copy|transpose)\(", text)
    report = step.memory_analysis()
    assert report is not None
    assert report.alias_size_in_bytes >= cache.bytes_per_page * cache.num_pages

    out = jax.eval_shape(job.function, *job.args)[2]
    greedy = partial(sample, shapes=shapes, num_rows=32, mode=SamplingMode.GREEDY)
    args = (params.without_layers, slots, None, out.last_hidden, out.sampling)
    text = compiled(place.job(greedy, args, (1,))).as_text() or ""
    assert exchanges(text) == ["all-gather"]
    assert re.search(r"s32\[2,2,32\]\S* all-gather", text), "the highest of each device alone"
