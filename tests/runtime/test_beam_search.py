"""Beam search over the real core, against the textbook's over the model alone."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.loading import resolve_model
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.beam_search import BeamSearch, BeamSearchParams
from paged.runtime.errors import InvalidRequest
from paged.runtime.llm import LLM
from paged.runtime.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from tests.models.harness import Runner
from tests.runtime.fakes import EOS, front, write_model
from tests.runtime.test_llm_end_to_end import FLAGS, MODEL

LONGEST = 48
PROMPTS = ["The sky", "Grass is", "x" * 17]
STOPS = tuple(range(3, 256, 5))
Scores = Callable[[list[int]], np.ndarray]


class Found(NamedTuple):
    score: float
    tokens: list[int]
    logprob: float


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), MODEL)


@pytest.fixture(scope="module")
def flags(folder: Path, compile_cache: str, few_programs: None) -> dict[str, Any]:
    sizes = {"block_size": 8, "max_num_seqs": 8, "max_model_len": LONGEST}
    return {**FLAGS, **sizes, "model": str(folder), "compile_cache_dir": compile_cache}


@pytest.fixture(scope="module")
def llm(flags: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**flags) as llm:
        yield llm


@pytest.fixture(scope="module")
def scores(folder: Path) -> Scores:
    source = resolve_model(folder, load_format="dummy")
    params = source.load(jnp.dtype("float32"), progress=False)
    runner = Runner(source.config, params, num_slots=1, max_tokens=LONGEST)

    def after(tokens: list[int]) -> np.ndarray:
        runner.contexts = [0]
        return runner.step({0: tokens}, num_tokens=LONGEST)[-1]

    return after


def textbook(scores: Scores, prompt: list[int], params: BeamSearchParams) -> list[Found]:
    """Every step extends every beam; whatever ends is kept; the best are picked in the end."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(params.max_tokens or 0):
        longer = []
        for tokens, logprob in beams:
            row = scores(prompt + tokens)
            for token in np.argsort(-row, kind="stable")[: 2 * params.beam_width].tolist():
                longer.append(([*tokens, token], logprob + float(row[token])))
        ended += [beam for beam in longer if beam[0][-1] in ends]
        going = [beam for beam in longer if beam[0][-1] not in ends]
        beams = sorted(going, key=lambda beam: -beam[1])[: params.beam_width]
        if params.early_stopping and len(ended) >= params.beam_width:
            break
    found = [
        Found(logprob / len(tokens) ** params.length_penalty, tokens, logprob)
        for tokens, logprob in ended
        + ([] if params.early_stopping and len(ended) >= params.beam_width else beams)
    ]
    return sorted(found, reverse=True)[: params.beam_width]


@pytest.mark.parametrize(
    "fields",
    [
        {"beam_width": 1},
        {"beam_width": 3},
        {"beam_width": 4, "stop_token_ids": STOPS},
        {"beam_width": 4, "stop_token_ids": STOPS, "length_penalty": 0.0},
        {"beam_width": 4, "stop_token_ids": STOPS, "length_penalty": 2.5},
        {"beam_width": 4, "stop_token_ids": STOPS, "length_penalty": -1.0},
        {"beam_width": 4, "stop_token_ids": STOPS, "early_stopping": True},
        {"beam_width": 2, "ignore_eos": True, "max_tokens": 1},
    ],
)
def test_it_finds_what_the_textbook_does(llm: LLM, scores: Scores, fields: Any) -> None:
    params = BeamSearchParams(**{"max_tokens": 12} | fields)
    outputs = llm.beam_search(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted = textbook(scores, llm.get_tokenizer().encode(prompt), params)
        assert [each.token_ids for each in output.outputs] == [each.tokens for each in wanted]
        found = [each.cumulative_logprob for each in output.outputs]
        assert found == pytest.approx([each.logprob for each in wanted], abs=1e-3)


def test_one_beam_is_greedy(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=12)
    (beam,) = llm.beam_search("abc", params, use_tqdm=False)
    (greedy,) = llm.generate("abc", params.whole, use_tqdm=False)
    assert beam.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert beam.outputs[0].text == greedy.outputs[0].text
    assert beam.outputs[0].finish_reason == greedy.outputs[0].finish_reason


def test_beams_share_pages(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.get_metrics()
    llm.beam_search("x" * 17, BeamSearchParams(beam_width=4, max_tokens=20), use_tqdm=False)
    after = llm.get_metrics()
    computed = after.prompt_tokens - before.prompt_tokens
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    # 76 requests after the first, of 27 tokens on average, each of which computes its last.
    assert hits > 1900
    assert computed == 17 + 76
    assert after.num_running == after.kv_cache_usage == 0


def test_both_ways_in_find_the_same(llm: LLM, flags: dict[str, Any]) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, stop_token_ids=STOPS)
    engine = AsyncEngine(**flags)

    async def run() -> list[RequestOutput]:
        return await asyncio.gather(*(engine.beam_search(each, params) for each in PROMPTS))

    try:
        online = asyncio.run(run())
    finally:
        engine.shutdown()
    offline = llm.beam_search(PROMPTS, params, use_tqdm=False)
    assert list(map(said, online)) == list(map(said, offline))
    assert online[0].prompt == PROMPTS[0]


def said(output: RequestOutput) -> list[tuple[str, list[int], str | None]]:
    return [(each.text, each.token_ids, each.finish_reason) for each in output.outputs]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": LONGEST}, "input_tokens"),
        ({"beam_width": 2, "stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_searched(llm: LLM, fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.beam_search("abc", BeamSearchParams(**fields), use_tqdm=False)
    assert caught.value.param == param


def answer(finish_reason: str, *logprobs: float) -> RequestOutput:
    candidates = {token: Logprob(logprob, token + 1) for token, logprob in enumerate(logprobs)}
    sequence = CompletionOutput(0, logprobs=[candidates], finish_reason=finish_reason)
    return RequestOutput("r", None, [1], None, [sequence], True, 0, RequestMetrics(0.0))


def search(**fields: Any) -> BeamSearch:
    given: dict[str, Any] = {"beam_width": 2, "stop_token_ids": (0,)} | fields
    params = BeamSearchParams(**given)
    prepared = front().prepare("r", [97], params.whole)
    return BeamSearch(prepared, params, frozenset({EOS}))


def test_it_ends_when_nothing_better_can_come() -> None:
    hopeless = search(length_penalty=0.0)
    hopeless.advance([answer("length", -0.1, -3.0, -4.0, -9.0)])
    assert hopeless.alive
    hopeless.advance([answer("length", -0.2, -3.0, -4.0, -9.0)] * 2)
    assert not hopeless.alive
    hopeful = replace(search(length_penalty=1.0))
    hopeful.advance([answer("length", -0.1, -3.0, -4.0, -9.0)])
    hopeful.advance([answer("length", -0.2, -3.0, -4.0, -9.0)] * 2)
    assert hopeful.alive


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_beam_that_is_ended_from_outside_ends_the_search(reason: str) -> None:
    ended = search()
    ended.advance([answer(reason)])
    assert not ended.prompts()
    assert [each.finish_reason for each in ended.result(None).outputs] == [reason]


def test_impossible_tokens_are_not_followed() -> None:
    narrow = search()
    narrow.advance([answer("length", float("-inf"), -0.5, float("-inf"))])
    assert [beam.tokens for beam in narrow.alive] == [(1,)]
