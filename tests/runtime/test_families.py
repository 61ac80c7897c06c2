"""Through the engine: layers that differ from each other, and a model that depends on a flag."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from paged.models.loading import resolve_model
from paged.runtime import setup
from paged.runtime.config import EngineConfig
from tests.models.harness import load_golden, write_checkpoint
from tests.runtime.test_core import FLAGS, compile_cache, make_core, make_request, run

__all__ = ["compile_cache"]


def test_the_engine_continues_as_transformers_does(tmp_path: Path, compile_cache: str) -> None:
    golden = load_golden("gemma3")
    core = make_core(resolve_model(write_checkpoint(tmp_path, golden)), compile_cache)
    request = make_request("one", golden["prompt"], max_tokens=len(golden["greedy"]))
    assert run(core, request) == {("one", 0): golden["greedy"]}
    core.close()


@pytest.mark.parametrize(
    ("max_model_len", "factors"), [(128, "short_factor"), (129, "long_factor")]
)
def test_longrope_turns_as_the_longest_sequence_asks(
    max_model_len: int, factors: str, tmp_path: Path
) -> None:
    """The first training of this one was on 128 tokens."""
    golden = load_golden("phi3_longrope_short_tied")
    model = resolve_model(write_checkpoint(tmp_path, golden)).config
    config = EngineConfig(**FLAGS, max_model_len=max_model_len)
    shapes, _, _ = setup._divide_memory(config, model, jax.devices()[0])
    assert shapes.model.rope_scaling is not None
    assert list(shapes.model.rope_scaling.divisors) == golden["config"]["rope_parameters"][factors]
