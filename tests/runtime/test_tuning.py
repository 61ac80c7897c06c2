"""The tilings an engine gets: from the table, from its folder, from a search, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from paged.attention.tiling import BY_RULE, Tilings, TritonDecode, TritonPrefill
from paged.attention.tuned import TUNED
from paged.attention.tuning.search import Tiling
from paged.attention.tuning.workloads import Case
from paged.cache import CacheSpec
from paged.models.registry import get_family, model_config
from paged.runtime import programs, tuning
from paged.runtime.buckets import Buckets
from paged.runtime.compiles import use_compile_cache
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.steps import StepShapes
from tests.runtime.test_program_store import half, with_a_hole

GPU: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA Test")
BF16 = jnp.dtype(jnp.bfloat16)
DECODE = TritonDecode(span=64, programs=1024)
PREFILL = TritonPrefill(span=64, queries=64, warps=4, stages=2)


class Clock:
    """A GPU on which two tilings are fast. `searches` counts how often it is asked."""

    searches = 0
    broken = False

    def __init__(self, layer: Any, pool_bytes: int) -> None:
        type(self).searches += 1
        assert 0 < pool_bytes <= 2**31

    def compile(self, case: Case, tiling: Tiling, *, may_spill: bool) -> Tiling:
        return tiling

    def microseconds(self, case: Case, program: Tiling) -> tuple[float, ...]:
        if self.broken:
            raise RuntimeError("CUPTI saw no kernel")
        return tuple(1.0 if program in (DECODE, PREFILL) else 2.0 for _ in case.workloads)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    clock = type("Fresh", (Clock,), {})
    monkeypatch.setattr(tuning, "GpuTimer", clock)
    return clock


def tilings(shapes: StepShapes, **how: Any) -> Tilings:
    how = {"seconds": 20, "memory": 2**36, "progress": False} | how
    dtype = how.pop("dtype", BF16)
    return tuning.tilings_for(shapes, dtype, GPU, **how)


def shapes_of(backend: str = "triton", heads: int = 8, max_num_seqs: int = 256) -> StepShapes:
    model = model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 64,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
        }
    )
    cache = CacheSpec(1, 2, 16, 2, 128, BF16)
    family = get_family(model.architecture)
    buckets = Buckets.make(max_num_seqs, 8192)
    return StepShapes(family, model, cache, buckets, 8192, backend)


def test_what_is_found_is_kept(
    folder: Path, clock: type[Clock], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="paged")
    found = tilings(shapes_of())
    assert found == Tilings(((256, DECODE),), ((2048, PREFILL),))
    assert "Tuned attention in" in caplog.text
    assert tilings(shapes_of()) == found
    assert clock.searches == 1
    assert len(list(folder.glob("*.tilings"))) == 1


@pytest.mark.parametrize(
    "other", [{"heads": 16}, {"max_num_seqs": 8}, {"backend": "mosaic"}], ids=str
)
def test_other_models_and_limits_are_tuned_apart(
    folder: Path, clock: type[Clock], other: dict[str, Any]
) -> None:
    tilings(shapes_of())
    tilings(shapes_of(**other))
    assert clock.searches == 2


@pytest.mark.parametrize(
    "how",
    [{"memory": None}, {"seconds": 0}, {"dtype": jnp.dtype(jnp.float32)}],
    ids=["CPU", "no time", "float32"],
)
def test_nothing_happens_where_nothing_shall(
    folder: Path, clock: type[Clock], how: dict[str, Any]
) -> None:
    assert tilings(shapes_of(), **how) == BY_RULE
    assert tilings(shapes_of("xla")) == BY_RULE
    assert clock.searches == 0


def test_nothing_is_found_that_cannot_be_kept(folder: Path, clock: type[Clock]) -> None:
    use_compile_cache("")
    assert tilings(shapes_of()) == BY_RULE
    assert clock.searches == 0


def test_what_is_in_the_table_is_not_searched(
    folder: Path, clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Tilings(((1, DECODE),))
    table = {GPU.device_kind: {(128, 4, 16, "bfloat16"): known}}
    monkeypatch.setattr(tuning, "TUNED", TUNED | table)
    assert tilings(shapes_of()) == known
    assert clock.searches == 0
    tilings(shapes_of(heads=16))
    assert clock.searches == 1


def of_other_times(kept: bytes) -> bytes:
    return kept.replace(b'"programs":1024', b'"programs":77')


def of_other_kernels(kept: bytes) -> bytes:
    return kept.replace(b"TritonDecode", b"TritonEncode")


@pytest.mark.parametrize(
    "damage", [half, with_a_hole, lambda _: b"", lambda _: b"[]", of_other_times, of_other_kernels]
)
def test_a_damaged_file_is_made_anew(
    folder: Path,
    clock: type[Clock],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
) -> None:
    found = tilings(shapes_of())
    [path] = folder.glob("*.tilings")
    path.write_bytes(damage(path.read_bytes()))
    assert tilings(shapes_of()) == found
    assert clock.searches == 2
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "does not load and is made anew" in said
    assert "\n" not in said
    assert tilings(shapes_of()) == found
    assert clock.searches == 2


def test_a_gpu_whose_clock_fails_goes_by_the_rule(
    folder: Path, clock: type[Clock], caplog: pytest.LogCaptureFixture
) -> None:
    clock.broken = True
    assert tilings(shapes_of()) == BY_RULE
    assert "not tuned, and goes by its rule: no attention kernel could be timed" in caplog.text
    assert "CUPTI saw no kernel" in caplog.text
    assert list(folder.glob("*.tilings")) == []


def test_programs_depend_on_what_was_found() -> None:
    found = (BY_RULE, Tilings(((1, DECODE),)))
    fixed = [programs._fixed(replace(shapes_of(), tilings=tilings)) for tilings in found]
    assert repr(fixed[0]) != repr(fixed[1])


def test_a_time_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="--attention-tuning-seconds must be at least 0"):
        EngineConfig(attention_tuning_seconds=-1)
