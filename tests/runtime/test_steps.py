"""The compiled programs: what they keep in place, and that they are all that serving needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from paged.cache import CacheSpec
from paged.groups import group_layers
from paged.models.loading.dummy import random_params
from paged.models.registry import get_family, model_config
from paged.models.weights import param_shapes
from paged.runtime.buckets import Buckets
from paged.runtime.compiler import Compiler
from paged.runtime.compiles import num_compiles
from paged.runtime.lowering import Key
from paged.runtime.programs import Programs, step_memory
from paged.runtime.steps import StepShapes

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
NUM_PAGES = 4099


@pytest.fixture(scope="module", params=["Llama", "Gemma2"])
def shapes(request: pytest.FixtureRequest) -> StepShapes:
    """Of a model whose layers are alike, and of one whose layers make two groups."""
    windows = {"sliding_window": 40, "head_dim": 8} if request.param == "Gemma2" else {}
    model = model_config(MODEL | windows | {"architectures": [f"{request.param}ForCausalLM"]})
    groups = group_layers(model.windows, 256)
    cache = CacheSpec(
        num_layers=len(groups[0].layers),
        num_pages=NUM_PAGES,
        page_size=16,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=jnp.dtype(jnp.float32),
        groups=groups,
    )
    family = get_family(model.architecture)
    return StepShapes(family, model, cache, Buckets.make(4, 32), 256, "xla")


@pytest.fixture(scope="module")
def programs(shapes: StepShapes) -> Programs:
    params = random_params(shapes.family.specs(shapes.model), jnp.dtype(jnp.float32))
    with Compiler() as compiler:
        return Programs(shapes, params, compiler, show_progress=False)


def keys(shapes: StepShapes) -> list[Key]:
    forwards: list[Key] = [("forward", bucket) for bucket in shapes.buckets.all()]
    return [*forwards, ("copy_pages",)]


def test_no_program_copies_the_pages(shapes: StepShapes, programs: Programs) -> None:
    """Also the step of a single token, whose write XLA would turn into a copy on a CPU."""
    cache_bytes = shapes.cache.bytes_per_page * NUM_PAGES
    for key in keys(shapes):
        report = programs[key].memory_analysis()
        assert report is not None
        assert report.alias_size_in_bytes >= cache_bytes, f"{key} does not take the pages over"
        assert report.temp_size_in_bytes < cache_bytes / 10, f"{key} holds a copy of pages"
        text = programs[key].as_text()
        assert text is not None
        rows = (str(NUM_PAGES), str(NUM_PAGES * 16))
        copies = [line for line in text.splitlines() if " copy(" in line]
        assert not [line for line in copies if any(f"[{n}," in line for n in rows)], key


def test_a_program_that_was_not_compiled_is_refused(programs: Programs) -> None:
    before = num_compiles()
    with pytest.raises(KeyError):
        programs["forward", "another shape"]
    assert num_compiles() == before


def test_compilations_are_counted() -> None:
    before = num_compiles()
    jax.block_until_ready(jax.jit(lambda x: x * 3 + before)(jnp.ones(7)))
    assert num_compiles() > before


def test_the_number_of_pages_changes_no_program_that_takes_none(
    folder: Path, shapes: StepShapes
) -> None:
    """Such are compiled to divide memory, before there are weights, and found again."""
    specs, dtype = shapes.family.specs(shapes.model), jnp.dtype(jnp.float32)
    with Compiler() as compiler:
        step_memory(shapes, param_shapes(specs, dtype), compiler)
        more = replace(shapes, cache=replace(shapes.cache, num_pages=NUM_PAGES + 1))
        programs = Programs(more, random_params(specs, dtype), compiler, show_progress=False)
    forward_programs_for_memory = 2
    kept = len(list(folder.glob("*.program")))
    assert kept == len(programs._compiled) + forward_programs_for_memory
