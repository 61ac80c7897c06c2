"""Models with windows through the engine: few pages, and the same answer however they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paged.models.loading import ModelSource, resolve_model
from paged.runtime import setup
from paged.runtime.compiler import Compiler
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.memory import MemoryPlan
from paged.runtime.messages import EngineRequest, SequenceOutput
from tests.models.harness import load_golden, write_checkpoint
from tests.runtime.test_core import (
    MODEL,
    drain,
    make_core,
    make_request,
    mixed_load,
    run,
    tokens_of,
)
from tests.runtime.test_scheduler import preempt_all

pytestmark = pytest.mark.usefixtures("few_programs")

WINDOW = 8  # of all goldens, whose prompts have 57 tokens
FLAGS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 96}
ENGINES: dict[str, dict[str, Any]] = {
    "pages of 8": {"block_size": 8},
    "whole prompts": {"block_size": 8, "max_num_batched_tokens": 128},
    "pages of 16, odd chunks": {"block_size": 16, "long_prefill_token_threshold": 7},
    "pages of 32, no prefix cache": {"block_size": 32, "enable_prefix_caching": False},
}
QUICK = (("mistral_window", "pages of 16, odd chunks"), ("gemma2", "pages of 8"))
FAMILIES = ("mistral_window", "qwen2_window", "gemma2", "gemma3", "gpt_oss", "cohere2")
CASES = [
    pytest.param(name, engine, marks=[] if (name, engine) in QUICK else pytest.mark.slow)
    for name in FAMILIES
    for engine in ENGINES
]


def source_of(name: str, folder: Path) -> ModelSource:
    return resolve_model(write_checkpoint(folder, load_golden(name)))


def run_preempted(core: EngineCore, *requests: EngineRequest) -> dict[tuple[str, int], list[int]]:
    """Run requests, of which all lose their pages at some time."""
    news: list[SequenceOutput] = []
    for request in requests:
        core.add(request)
    for _ in range(9):
        news += core.step()
    preempt_all(core._scheduler)
    core.reset_prefix_cache()
    assert core.stats().num_preemptions > 0
    return tokens_of(news + drain(core))


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_the_engine_continues_as_transformers_does(
    name: str, engine: str, tmp_path: Path, compile_cache: str
) -> None:
    """Alone, again from the prefix cache, with forks, and after a preemption."""
    golden, flags = load_golden(name), FLAGS | ENGINES[engine]
    core = make_core(source_of(name, tmp_path), compile_cache, **flags)
    prompt, greedy = golden["prompt"], golden["greedy"]
    for turn in ("first", "again"):
        request = make_request(turn, prompt, max_tokens=len(greedy))
        assert run(core, request) == {(turn, 0): greedy}
    found = 56 // flags["block_size"] * flags["block_size"]
    cached = flags.get("enable_prefix_caching", True)
    assert core.stats().prefix_cache_hits == (found if cached else 0)
    forks = make_request("b", prompt, n=2, temperature=1.0, top_k=1)
    answers = run_preempted(core, make_request("a", prompt, max_tokens=16), forks)
    assert answers == {("a", 0): greedy, ("b", 0): greedy[:12], ("b", 1): greedy[:12]}
    assert core.stats().kv_cache_usage == 0
    assert core.stats().compiles_after_warmup == 0
    core.close()


@pytest.mark.parametrize("name", ["mistral_window", "gemma2"])
def test_a_long_sequence_holds_the_pages_of_its_window(
    name: str, tmp_path: Path, compile_cache: str
) -> None:
    flags = {**FLAGS, "block_size": 8, "max_model_len": 256}
    core = make_core(source_of(name, tmp_path), compile_cache, **flags)
    core.add(make_request("long", load_golden(name)["prompt"], max_tokens=190))
    window, keeps_all = WINDOW // 8 + 2, name == "gemma2"
    most = 0
    while core.has_work:
        core.step()
        stats, num_tokens = core.stats(), core._prompt_tokens + core._generation_tokens
        held = round(stats.kv_cache_usage * stats.num_pages)
        chunk = 16 // 8 if num_tokens <= 57 else 0
        assert held <= window + chunk + keeps_all * (max(num_tokens, 57) // 8 + 1)
        most = max(most, held)
    assert most >= keeps_all * 246 // 8
    core.close()


# A window that no page size divides, in layers of two groups; heads and vocabulary as odd.
ODD_WINDOWS = MODEL | {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 10,
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_a_crowd_in_few_pages_answers_as_one_by_one(
    cached: bool, tmp_path: Path, compile_cache: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ODD_WINDOWS))
    source = resolve_model(tmp_path, load_format="dummy")
    page_bytes = 8 * 2 * 2 * 10 * 4  # tokens, keys and values, heads, head size, float32
    few = {"kv_cache_memory_bytes": 54 * page_bytes, "enable_prefix_caching": cached}
    core = make_core(source, compile_cache, **few)
    alone: dict[tuple[str, int], list[int]] = {}
    for request in mixed_load():
        alone |= run(core, request)
        assert core.reset_prefix_cache()
    assert run_preempted(core, *mixed_load()) == alone
    stats = core.stats()
    assert stats.kv_cache_usage == 0
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    core.close()


def memory_of(source: ModelSource, **flags: Any) -> MemoryPlan:
    config = EngineConfig(**FLAGS | flags, kv_cache_memory_bytes=2**20)
    with Compiler() as compiler:
        part = setup._Part(None, jax.devices()[:1], compiler)
        dtype = jnp.dtype(jnp.float32)
        return setup._divide_memory(config, source, part, dtype, progress=False)[1]


def test_windows_make_room(tmp_path: Path) -> None:
    """Of 256 tokens a window of 8 leaves 2 pages of 8, and some of a third."""
    mistral = source_of("mistral_window", tmp_path / "mistral")
    gemma = source_of("gemma2", tmp_path / "gemma")
    long = {"block_size": 8, "max_model_len": 256}
    short = {"block_size": 8, "max_model_len": WINDOW}
    assert memory_of(mistral, **long).pages_per_sequence == 2
    assert memory_of(gemma, **long).pages_per_sequence == 32 + 2
    assert memory_of(gemma, **short).pages_per_sequence == 1, "one group: no window ever moves"
    assert memory_of(gemma, **long).bytes_per_page * 2 == memory_of(gemma, **short).bytes_per_page
    assert memory_of(gemma, **long).num_tokens > 1.8 * memory_of(gemma, **short).num_tokens
    assert memory_of(mistral, **long).num_tokens > 15 * memory_of(mistral, **short).num_tokens
