"""Structured output from end to end, on a tiny random model that speaks bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from llguidance import LLParserLimits

from paged.runtime import guides
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.errors import InvalidRequest
from paged.runtime.llm import LLM
from paged.runtime.outputs import CompletionOutput
from paged.runtime.plan import StepPlan
from paged.runtime.runner import InFlight, StepRunner
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams
from paged.runtime.structured_outputs import StructuredOutputsParams
from tests.runtime.fakes import EOS, write_model
from tests.runtime.structured_cases import CASES, Case

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 299,  # no multiple of the 32 bits in a word, and more than the tokenizer knows
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": EOS,
    "initializer_range": 0.5,
}
FLAGS: dict[str, Any] = {
    "load_format": "dummy",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "kv_cache_memory_bytes": 2**21,
    "max_model_len": 1024,
}
PROMPT = "Say something: "
PAGE_BYTES = 16 * 2 * 16 * 4  # tokens, keys and values, head size, float32


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> dict[str, Any]:
    folder = write_model(tmp_path_factory.mktemp("model"), MODEL)
    return {"model": str(folder), "compile_cache_dir": compile_cache, **FLAGS}


@pytest.fixture(scope="module")
def llm(flags: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**flags) as llm:
        yield llm


def wish(case: Case, **params: Any) -> SamplingParams:
    params = {"temperature": 1.0, "max_tokens": 400, "seed": 7, **params}
    return SamplingParams(structured_outputs=case.params, **params)


def generate(llm: LLM, *params: SamplingParams, prompt: str = PROMPT) -> list[CompletionOutput]:
    before = llm.get_metrics().compiles_after_warmup
    outputs = llm.generate([prompt] * len(params), list(params), use_tqdm=False)
    assert llm.get_metrics().compiles_after_warmup == before
    assert llm.get_metrics().kv_cache_usage == 0
    return [sequence for output in outputs for sequence in output.outputs]


def check(case: Case, output: CompletionOutput) -> None:
    assert output.error is None
    assert output.finish_reason == "stop"
    assert output.stop_reason is None
    assert case.fulfils(output.text)


@pytest.mark.parametrize("name", CASES)
def test_every_output_is_what_was_asked_for(llm: LLM, name: str) -> None:
    case = CASES[name]
    outputs = generate(llm, wish(case, n=3), wish(case, temperature=0), wish(case, top_k=5))
    assert len(outputs) == 5
    for output in outputs:
        check(case, output)


VARIANTS: dict[str, dict[str, Any]] = {
    "filters": {"top_p": 0.8, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {ord("x"): 100.0, ord("{"): -100.0}},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 1},
    "never an end": {"ignore_eos": True},
    "not before its time": {"min_tokens": 350},
    "hot": {"temperature": 50.0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_with_other_parameters(llm: LLM, name: str) -> None:
    cases = [CASES["record"], CASES["prefixes"]]
    for case, output in zip(
        cases, generate(llm, *(wish(case, **VARIANTS[name]) for case in cases)), strict=True
    ):
        check(case, output)


FREE = [SamplingParams(temperature=0, max_tokens=60), SamplingParams(seed=3, max_tokens=40)]


def mixed_load() -> list[SamplingParams]:
    asked = [wish(case, seed=i) for i, case in enumerate(CASES.values())]
    return [*FREE, *asked, *(replace(each, n=2, seed=9) for each in asked[:4]), *FREE]


def test_answers_do_not_depend_on_company(llm: LLM) -> None:
    params = mixed_load()
    alone = [output.token_ids for each in params for output in generate(llm, each)]
    assert [output.token_ids for output in generate(llm, *params)] == alone


@pytest.mark.slow
def test_answers_do_not_depend_on_preemptions(llm: LLM, flags: dict[str, Any]) -> None:
    params = mixed_load()
    expected = [output.token_ids for output in generate(llm, *params)]
    few = {"kv_cache_memory_bytes": 80 * PAGE_BYTES, "enable_prefix_caching": False}
    with LLM(**{**flags, **few, "max_num_seqs": 8}) as crowded:
        outputs = generate(crowded, *params, *[replace(FREE[0], max_tokens=500)] * 3)
        assert crowded.get_metrics().num_preemptions > 0
        assert [output.token_ids for output in outputs[: len(expected)]] == expected


def test_a_slot_forgets_the_grammar_of_the_sequence_before(llm: LLM) -> None:
    biased = SamplingParams(temperature=0, max_tokens=20, logit_bias={ord("q"): 1e2})
    [before] = generate(llm, biased)
    for _ in range(4):
        generate(llm, wish(CASES["choice"]))
    [after] = generate(llm, biased)
    assert after.token_ids == before.token_ids


def test_cut_off(llm: LLM) -> None:
    case = CASES["const"]
    [output] = generate(llm, wish(case, max_tokens=4))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 4)


def test_complete_with_the_last_token_is_a_stop(llm: LLM) -> None:
    case = CASES["choice"]
    [output] = generate(llm, wish(replace_choice(case, ["positive"]), max_tokens=len("positive")))
    assert (output.finish_reason, output.text) == ("stop", "positive")


def replace_choice(case: Case, choices: list[str]) -> Case:
    return replace(case, params=StructuredOutputsParams(choice=choices))


def test_the_end_token_comes_where_the_grammar_may_end(llm: LLM) -> None:
    ends = {ids[-1] == EOS for ids in prefixes(llm)}
    assert ends == {True, False}  # "a" and "ab" may go on, "abc" may not


def prefixes(llm: LLM) -> list[list[int]]:
    case = CASES["prefixes"]
    bias = {ord("b"): 6.0, ord("c"): 6.0, EOS: 6.0}
    many = [wish(case, seed=seed, n=4, logit_bias=bias) for seed in range(4)]
    outputs = generate(llm, *many)
    for output in outputs:
        check(case, output)
        assert (output.token_ids[-1] == EOS) == (output.text != "abc")
    return [output.token_ids for output in outputs]


def test_stop_strings(llm: LLM) -> None:
    case = replace_choice(CASES["choice"], ["one two three"])
    [output] = generate(llm, wish(case, stop=" two"))
    assert (output.text, output.finish_reason, output.stop_reason) == ("one", "stop", " two")


def test_what_cannot_be_enforced_is_refused(llm: LLM) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        generate(llm, SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    grammar = StructuredOutputsParams(grammar='start: "a" <|nobody|>')
    with pytest.raises(InvalidRequest, match=r"unknown special token"):
        generate(llm, SamplingParams(structured_outputs=grammar))
    check(CASES["boolean"], generate(llm, wish(CASES["boolean"]))[0])


def test_a_grammar_too_costly_to_follow_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guides, "LIMITS", LLParserLimits(step_max_items=1))
    schema = {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}
    costly = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    failed, fine = generate(llm, costly, wish(CASES["boolean"]))
    assert failed.finish_reason == "error"
    assert failed.error
    check(CASES["boolean"], fine)


def test_masks_are_made_while_the_device_computes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is enqueued up to the choice of its tokens before the step before it is read."""
    calls: list[tuple[str, StepPlan | None]] = []

    def told(owner: type, name: str, plan_of: Callable[..., StepPlan | None]) -> None:
        function = getattr(owner, name)

        def call(*args: Any) -> Any:
            calls.append((name, plan_of(*args)))
            return function(*args)

        monkeypatch.setattr(owner, name, call)

    told(StepRunner, "start", lambda _, plan: plan)
    told(InFlight, "read", lambda step: step.plan)
    told(guides.Grammars, "masks", lambda *_: None)
    told(StepRunner, "load_masks", lambda *_: None)
    told(StepRunner, "finish", lambda _, started: started.plan)
    [output] = generate(llm, wish(CASES["phone"]))
    [first, *later] = _by_step(calls)
    assert [name for name, _ in first] == ["start", "masks", "load_masks", "finish"]
    for before, now in pairwise([first, *later[:-1]]):
        assert [name for name, _ in now] == ["start", "read", "masks", "load_masks", "finish"]
        assert now[1][1] is before[0][1]
        assert now[0][1] is now[4][1] is not before[0][1]
    # The last was enqueued before the token was read that ended the sequence.
    assert len(output.token_ids) == len(later)
    assert [name for name, _ in later[-1]][:2] == ["start", "read"]
    assert "masks" not in dict(later[-1])


def _by_step(calls: list[tuple[str, StepPlan | None]]) -> list[list[tuple[str, StepPlan | None]]]:
    steps: list[list[tuple[str, StepPlan | None]]] = []
    for call in calls:
        if call[0] == "start":
            steps.append([])
        steps[-1].append(call)
    return steps


@pytest.mark.parametrize("separate_process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_streams(llm: LLM, flags: dict[str, Any], separate_process: bool) -> None:
    params = [wish(case, n=2) for case in CASES.values()]
    expected = generate(llm, *params)
    engine = AsyncEngine(**flags, separate_process=separate_process)

    async def stream(wanted: SamplingParams) -> list[CompletionOutput]:
        joined = [CompletionOutput(index) for index in range(2)]
        wanted = replace(wanted, output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate(PROMPT, wanted):
            for delta in output.outputs:
                joined[delta.index].text += delta.text
                joined[delta.index].finish_reason = delta.finish_reason
        return joined

    async def leave_early() -> None:
        async for _ in engine.generate(PROMPT, wish(CASES["text"], n=3)):
            break

    async def run() -> list[list[CompletionOutput]]:
        leaving = [leave_early() for _ in range(3)]
        results = await asyncio.gather(*(stream(each) for each in params), *leaving)
        return [result for result in results if result is not None]

    try:
        streamed = [output for outputs in asyncio.run(run()) for output in outputs]
    finally:
        engine.shutdown()
    assert [(o.text, o.finish_reason) for o in streamed] == [
        (o.text, o.finish_reason) for o in expected
    ]
