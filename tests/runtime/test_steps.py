"""The compiled programs: what they keep in place, and that they are all that serving needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.cache import CacheSpec
from paged.groups import group_layers
from paged.models.loading.dummy import random_params
from paged.models.registry import get_family, model_config
from paged.models.weights import param_shapes
from paged.runtime import steps
from paged.runtime.batch import SAMPLING_FIELDS, SlotSampling
from paged.runtime.buckets import Buckets
from paged.runtime.compiler import Compiler
from paged.runtime.compiles import num_compiles, use_compile_cache
from paged.runtime.lowering import Key
from paged.runtime.programs import Programs, step_memory
from paged.runtime.sampler import SamplingMode
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
    buckets = Buckets(decode=(1, 2), mixed=(16,), sampling=(2,))
    return StepShapes(family, model, cache, buckets, 256, "xla")


class Made(NamedTuple):
    """All programs, and how many were kept on disk with those that divide memory.

    The latter were compiled first, for another number of pages.
    """

    programs: Programs
    num_kept: int


@pytest.fixture(scope="module")
def made(shapes: StepShapes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    specs, dtype = shapes.family.specs(shapes.model), jnp.dtype(jnp.float32)
    fewer = replace(shapes, cache=replace(shapes.cache, num_pages=NUM_PAGES - 1))
    folder = tmp_path_factory.mktemp("jit")
    use_compile_cache(str(folder))
    with Compiler() as compiler:
        step_memory(fewer, param_shapes(specs, dtype), compiler)
        programs = Programs(shapes, random_params(specs, dtype), compiler, show_progress=False)
    yield Made(programs, len(list(folder.glob("*.program"))))
    use_compile_cache("")


@pytest.fixture
def programs(made: Made) -> Programs:
    return made.programs


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


def test_rows_in_groups_are_sampled_and_scored_as_all_at_once(
    shapes: StepShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows, two at a time: the last group is filled up."""
    shapes = replace(shapes, buckets=replace(shapes.buckets, decode=(5,)))
    params = random_params(shapes.family.specs(shapes.model), jnp.dtype(jnp.float32)).without_layers
    hidden = jax.random.normal(jax.random.key(0), (5, shapes.model.hidden_size))
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    slots = SlotSampling(5)
    for slot in range(5):
        filters = {"temperature": slot / 2, "top_p": 0.9, "min_p": 0.0}
        slots.set(slot, seed=slot, top_k=50, floats=filters | penalties)
    slots.table[:, SAMPLING_FIELDS.index("samples")] = 1
    state = shapes.sampler_state()
    state = replace(state, in_prompt=state.in_prompt.at[:, ::3].set(True))

    def told() -> list[np.ndarray]:
        sampled = steps.sample(
            params,
            shapes.slot_state(),
            state,
            hidden,
            jnp.asarray(slots.table),
            shapes=shapes,
            num_rows=5,
            mode=SamplingMode.LOGPROBS,
        )
        scored = steps.score(params, hidden, jnp.arange(5), shapes=shapes)
        return [np.asarray(each) for each in jax.tree.leaves((sampled, scored))]

    at_once = told()
    monkeypatch.setattr(steps, "SAMPLE_ROWS", 2)
    monkeypatch.setattr(steps, "_SCORE_ROWS", 2)
    for found, expected in zip(told(), at_once, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_program_that_was_not_compiled_is_refused(programs: Programs) -> None:
    before = num_compiles()
    with pytest.raises(KeyError):
        programs["forward", "another shape"]
    assert num_compiles() == before


def test_compilations_are_counted() -> None:
    before = num_compiles()
    jax.block_until_ready(jax.jit(lambda x: x * 3 + before)(jnp.ones(7)))
    assert num_compiles() > before


def test_the_number_of_pages_changes_no_program_that_takes_none(made: Made) -> None:
    """Such are compiled to divide memory, before there are weights, and found again."""
    forward_programs_for_memory = 2
    assert made.num_kept == len(made.programs._compiled) + forward_programs_for_memory


@pytest.mark.parametrize("mode", SamplingMode)
def test_memory_is_that_of_any_sampling_mode(shapes: StepShapes, mode: SamplingMode) -> None:
    """XLA may find another way for each, with other temporaries."""
    largest: Key = ("sample", shapes.buckets.sampling[-1], mode)

    class Reporting(Compiler):
        def begin(self, fixed: Any, jobs: Any) -> Any:
            return {}

        def programs(self, fixed: Any, jobs: Any, **how: Any) -> Any:
            return {key: reporting(7000 if key == largest else 7) for key, _ in jobs}

    def reporting(temporary: int) -> Any:
        report = SimpleNamespace(
            temp_size_in_bytes=temporary, output_size_in_bytes=1, alias_size_in_bytes=0
        )
        return SimpleNamespace(memory_analysis=lambda: report)

    params = param_shapes(shapes.family.specs(shapes.model), jnp.dtype(jnp.float32))
    with Reporting() as compiler:
        assert step_memory(shapes, params, compiler) == 7002
