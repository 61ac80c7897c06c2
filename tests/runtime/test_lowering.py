"""Programs lowered in other processes: the same as those lowered here, whatever happens there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from paged.cache import CacheSpec
from paged.models.loading.dummy import random_params
from paged.models.registry import get_family, model_config
from paged.models.weights import for_device, param_shapes
from paged.runtime.buckets import Buckets
from paged.runtime.lowering import Job, Lowering, Target, export_job, processes_for
from paged.runtime.programs import abstract, all_jobs
from paged.runtime.steps import StepShapes

VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((3, 3), jnp.float32)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Lowering]:
    with closing(Lowering(1)) as lowering:
        yield lowering


def test_a_step_is_the_same_wherever_it_is_lowered(
    elsewhere: Lowering, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = step_shapes(jnp.dtype(jnp.float32), "xla")
    params = random_params(shapes.family.specs(shapes.model), jnp.dtype(jnp.float32))
    with closing(Lowering()) as here:
        jobs = {key[0]: job for key, job in all_jobs(shapes, abstract(params))}  # one of each kind
        del jobs["sample"]  # which alone takes the compiler longer than all others
        for kind, job in jobs.items():
            one, other = (lowering((kind,), job).compile() for lowering in (here, elsewhere))
            arguments = [jax.tree.map(filled, job.args) for _ in range(2)]
            expected, found = one(*arguments[0]), other(*arguments[1])
            assert str(jax.tree.structure(expected)) == str(jax.tree.structure(found))
            for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert bool(jnp.array_equal(a, b, equal_nan=True)), kind
            taken = [arguments[1][number] for number in job.donated]
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(taken)), kind
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("kind", "backend"), [("H200", "mosaic"), ("L40", "triton")])
def test_steps_for_a_gpu_are_lowered_where_there_is_none(kind: str, backend: str) -> None:
    gpu = AbstractDevice(device_kind=f"NVIDIA {kind}", num_cores=None, platform="gpu")
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((1,), ("device",), axis_types=auto, abstract_device=gpu)
    bfloat16 = jnp.dtype(jnp.bfloat16)
    shapes = step_shapes(bfloat16, backend)
    params = param_shapes(shapes.family.specs(shapes.model), bfloat16)
    if backend == "mosaic":
        hopper = SimpleNamespace(
            platform="gpu", compute_capability="9.0", device_kind=gpu.device_kind
        )
        params = for_device(params, hopper)
    jobs = {key[0]: job for key, job in all_jobs(shapes, params)}
    for kind in ("forward", "sample"):
        exported = export.deserialize(bytearray(export_job(jobs[kind], Target("cuda", mesh))[0]))
        assert exported.platforms == ("cuda",)
        assert "custom_call" in exported.mlir_module(), "no kernel of ours"


def step_shapes(dtype: jnp.dtype, backend: str) -> StepShapes:
    model = model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 256,
            "max_position_embeddings": 64,
        }
    )
    cache = CacheSpec(1, 9, 16, 2, 64, dtype)
    family = get_family(model.architecture)
    return StepShapes(family, model, cache, Buckets.make(2, 8), 64, backend)


def filled(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(shape.shape, 1, shape.dtype)


def test_settings_are_those_of_this_process() -> None:
    name = "jax_default_matmul_precision"
    before = jax.config.values[name]
    jax.config.update(name, "highest")
    try:
        with closing(Lowering(1)) as lowering:
            lowered = lowering(("dot",), Job(lax.dot, (MATRIX, MATRIX)))
    finally:
        jax.config.update(name, before)
    assert "HIGHEST" in lowered.as_text()


def test_what_cannot_go_there_is_lowered_here(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Lowering(1)) as lowering:
        for _ in range(2):
            doubled = lowering(("double",), Job(lambda x: 2 * x, (VECTOR,))).compile()
    assert doubled(jnp.ones(3)).tolist() == [2, 2, 2]
    (message,) = caplog.messages
    assert message.startswith("Programs are lowered in this process: ")


def test_an_error_of_the_function_is_raised_here() -> None:
    with closing(Lowering(1)) as lowering, pytest.raises(ValueError, match="lhs_shape"):
        lowering(("dot",), Job(lax.dot, (MATRIX, jax.ShapeDtypeStruct((2, 2), jnp.float32))))


def test_when_the_process_dies_it_is_done_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with closing(Lowering(1)) as lowering:
        lowering(("sin",), Job(lax.sin, (VECTOR,)))
        (worker,) = lowering._workers
        worker._process.end(0)
        assert lowering(("cos",), Job(lax.cos, (VECTOR,))).compile()(jnp.zeros(3)).sum() == 3
    assert len(caplog.messages) == 1


def test_closing_ends_the_processes() -> None:
    lowering = Lowering(1)
    lowering(("sin",), Job(lax.sin, (VECTOR,)))
    pids = [worker._process.pid for worker in lowering._workers]
    lowering.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_cpu_needs_no_processes() -> None:
    assert processes_for(jax.devices("cpu")) == 0
