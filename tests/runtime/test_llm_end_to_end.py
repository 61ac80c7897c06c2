"""LLM and AsyncEngine over the real core, on a tiny random model that speaks bytes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.llm import LLM
from paged.runtime.messages import SequenceOutput
from paged.runtime.outputs import RequestOutput
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams
from tests.runtime.fakes import EOS, write_model

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": EOS + 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": EOS,
    "initializer_range": 0.5,
}
FLAGS: dict[str, Any] = {
    "load_format": "dummy",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "kv_cache_memory_bytes": 2**20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = ["The sky is", "Grass", "Ünïcödé 你好 😀", "x" * 50]


@pytest.fixture(scope="module")
def flags(
    tmp_path_factory: pytest.TempPathFactory, compile_cache: str, few_programs: None
) -> dict[str, Any]:
    folder = write_model(tmp_path_factory.mktemp("model"), MODEL)
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "max_new_tokens": 6}')
    return {"model": str(folder), "compile_cache_dir": compile_cache, **FLAGS}


@pytest.fixture(scope="module")
def llm(flags: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**flags) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(flags: dict[str, Any], llm: LLM) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(**flags)
    yield engine
    engine.shutdown()


async def collect(engine: AsyncEngine, *arguments: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*arguments)]


def test_text_is_what_the_tokenizer_makes_of_the_tokens(llm):
    decode = llm.get_tokenizer().decode
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        (sequence,) = output.outputs
        assert output.prompt == prompt
        assert sequence.text == decode(sequence.token_ids)
        assert len(sequence.token_ids) == 20


def test_both_ways_in_give_the_same(llm, engine):
    async def run() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, prompt, GREEDY) for prompt in PROMPTS))

    offline = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    online = [outputs[-1] for outputs in asyncio.run(run())]
    assert [each.outputs for each in online] == [each.outputs for each in offline]


def test_deltas_add_up(llm, engine):
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 3,
        "n": 3,
        "max_tokens": 30,
        "logprobs": 2,
    }
    whole = llm.generate("abc", SamplingParams(**fields), use_tqdm=False)[0]
    params = SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
    deltas = asyncio.run(collect(engine, "abc", params))
    for sequence in whole.outputs:
        mine = [each for d in deltas for each in d.outputs if each.index == sequence.index]
        assert "".join(each.text for each in mine) == sequence.text
        assert [token for each in mine for token in each.token_ids] == sequence.token_ids
        assert mine[-1].finish_reason == sequence.finish_reason


def test_a_stop_string_cuts_the_same_text(llm):
    whole = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = whole[3:5]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[stop])
    (output,) = llm.generate("abc", params, use_tqdm=False)
    assert output.outputs[0].text == whole[: whole.index(stop)]
    assert output.outputs[0].stop_reason == stop
    assert llm.get_metrics().num_running == 0


def test_the_models_own_parameters(llm):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=6)
    (output,) = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    assert output.prompt == "<user>hi:"
    assert len(output.outputs[0].token_ids) <= 6


def test_leaving_gives_the_pages_back(engine, monkeypatch):
    core = engine._keeper.thread._engine._core
    step, told, has_left = core.step, list[SequenceOutput](), threading.Event()

    def until_the_first_token() -> list[SequenceOutput]:
        """Else it might be over before anybody looks."""
        assert not told or has_left.wait(30)
        news = step()
        told.extend(news)
        return news

    monkeypatch.setattr(core, "step", until_the_first_token)

    async def run() -> None:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        async with aclosing(engine.generate("abc", params)) as stream:
            await anext(stream)
            assert engine.stats().num_running == 1
        has_left.set()
        while engine.stats().num_running or engine.stats().kv_cache_usage:
            await asyncio.sleep(0.001)
        assert await engine.reset_prefix_cache()

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_token_ids_alone(flags):
    with LLM(**flags | {"skip_tokenizer_init": True}) as llm:
        (output,) = llm.generate({"prompt_token_ids": [97, 98]}, GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 20
        assert output.outputs[0].text == ""
        assert llm.about.memory.page_size == llm.get_metrics().page_size


def test_neutral_defaults_and_another_tokenizer(flags):
    changes = {"generation_config": "paged", "tokenizer": flags["model"]}
    with LLM(**flags | changes) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.get_tokenizer().encode("a") == [97]


@pytest.mark.slow
def test_the_embedded_model_knows_paris(tmp_path):
    with LLM(max_model_len=256, max_num_seqs=1, max_num_batched_tokens=32) as llm:
        (output,) = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    assert output.outputs[0].text.startswith(" Paris")
