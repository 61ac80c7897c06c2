"""Pages of latents through the whole engine: chunks, page sizes, shared prefixes, preemption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paged.models.loading import ModelSource, resolve_model
from paged.runtime.core import EngineCore
from paged.runtime.errors import ConfigError
from tests.models.harness import load_golden, write_checkpoint
from tests.runtime.test_core import make_core, make_request, run

pytestmark = pytest.mark.usefixtures("few_programs")

GOLDEN = load_golden("deepseek_v3")
PROMPT, GREEDY = GOLDEN["prompt"], GOLDEN["greedy"]
LAYERS, ROW = 3, 28 + 10
# A prompt of 57 tokens takes four steps.
FLAGS: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 96}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder: Path = tmp_path_factory.mktemp("deepseek")
    return resolve_model(write_checkpoint(folder, GOLDEN))


@pytest.fixture(scope="module")
def core(source: ModelSource, compile_cache: str) -> Iterator[EngineCore]:
    core = make_core(source, compile_cache, **FLAGS)
    yield core
    core.close()


def check_answers(core: EngineCore) -> None:
    """As transformers does, and again from the prefix cache."""
    first = run(core, make_request("one", PROMPT, max_tokens=len(GREEDY)))
    assert first == {("one", 0): GREEDY}
    assert core.stats().prefix_cache_hits == 0
    again = [make_request(name, PROMPT, max_tokens=len(GREEDY)) for name in ("two", "three")]
    assert run(core, *again) == {("two", 0): GREEDY, ("three", 0): GREEDY}
    assert core.stats().prefix_cache_hits > 0


def test_answers_are_those_of_transformers(core: EngineCore) -> None:
    check_answers(core)


@pytest.mark.parametrize("page_size", [16, 32])
def test_the_page_size_changes_nothing(
    page_size: int, source: ModelSource, compile_cache: str
) -> None:
    core = make_core(source, compile_cache, **FLAGS, block_size=page_size)
    check_answers(core)
    core.close()


def test_a_token_takes_one_row_a_layer(core: EngineCore) -> None:
    memory = core.memory
    assert memory.bytes_per_page == LAYERS * memory.page_size * ROW * 4
    assert memory.num_pages == 2**20 // memory.bytes_per_page


def test_preemption_changes_nothing(
    core: EngineCore, source: ModelSource, compile_cache: str
) -> None:
    requests = [
        make_request(name, prompt, max_tokens=60)
        for name, prompt in (("one", PROMPT[:20]), ("two", PROMPT[20:40]))
    ]
    alone = [run(core, request) for request in requests]
    # Room for one and a half of them.
    room = 15 * core.memory.bytes_per_page
    small = make_core(source, compile_cache, **FLAGS, kv_cache_memory_bytes=room)
    assert run(small, *requests) == alone[0] | alone[1]
    assert small.stats().num_preemptions > 0
    small.close()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_pages_of_8_bits_are_refused(name: str, source: ModelSource, compile_cache: str) -> None:
    with pytest.raises(ConfigError, match=rf"--kv-cache-dtype {name} .* latents .* Use auto"):
        make_core(source, compile_cache, **FLAGS, kv_cache_dtype=name)
