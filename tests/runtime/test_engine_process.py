"""The real core in a process of its own, on a tiny random model: nobody can tell the difference."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.errors import ConfigError
from paged.runtime.messages import EngineStats
from paged.runtime.outputs import CompletionOutput
from paged.runtime.sampling_params import SamplingParams
from tests.runtime.test_async_engine import collect, until
from tests.runtime.test_core import FLAGS, MODEL, mixed_load, prompt_of

FEW_PROGRAMS = FLAGS | {"max_num_seqs": 1, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(MODEL))
    found = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    return FEW_PROGRAMS | found | {"compile_cache_dir": compile_cache}


@pytest.fixture(scope="module")
def here(flags: dict[str, Any]) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(**flags)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def apart(here: AsyncEngine, flags: dict[str, Any]) -> Iterator[AsyncEngine]:
    """After the other: its programs are in the compilation cache then."""
    engine = AsyncEngine(**flags, separate_process=True)
    yield engine
    engine.shutdown()


def answers(engine: AsyncEngine) -> list[list[CompletionOutput]]:
    async def run() -> list[list[CompletionOutput]]:
        requests = [
            collect(engine, request.prompt_token_ids, request.params) for request in mixed_load()
        ]
        return [outputs[-1].outputs for outputs in await asyncio.gather(*requests)]

    return asyncio.run(run())


def test_answers_are_the_same(here: AsyncEngine, apart: AsyncEngine) -> None:
    assert answers(apart) == answers(here)
    assert apart.max_model_len == here.max_model_len
    assert apart.stats().compiles_after_warmup == 0


def test_log_probabilities_are_the_same(here: AsyncEngine, apart: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=4, prompt_logprobs=3)
    pair = [asyncio.run(collect(engine, prompt_of(20), params))[-1] for engine in (here, apart)]
    assert pair[0].outputs == pair[1].outputs
    assert pair[0].prompt_logprobs == pair[1].prompt_logprobs


def test_aborted_requests_give_their_pages_back(apart: AsyncEngine) -> None:
    async def run() -> None:
        # Thousands of steps, so that some are left however late they are ended.
        params = SamplingParams(max_tokens=190, ignore_eos=True, temperature=1.0, n=16)
        requests = [
            asyncio.create_task(collect(apart, prompt_of(60, i), params, str(i))) for i in range(3)
        ]
        await until(lambda: apart.stats().kv_cache_usage > 0)
        requests[0].cancel()
        await apart.abort("1")
        await apart.abort("2")
        await asyncio.gather(*requests, return_exceptions=True)
        await until(lambda: _is_idle(apart.stats()))

    asyncio.run(run())
    stats = apart.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def _is_idle(stats: EngineStats) -> bool:
    return stats.num_running == stats.num_waiting == stats.kv_cache_usage == 0


def test_flags_that_do_not_fit_are_refused_in_the_same_words(flags: dict[str, Any]) -> None:
    flags = flags | {"max_num_seqs": 64}
    messages = []
    for separate in (False, True):
        with pytest.raises(ConfigError, match="max-num-batched-tokens") as caught:
            AsyncEngine(**flags, separate_process=separate)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
