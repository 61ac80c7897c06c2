"""Words and tokens that are ruled out, alone and beside a form of the output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paged.runtime.bans import Bans, Recent
from paged.runtime.llm import LLM
from paged.runtime.outputs import CompletionOutput
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.structured_outputs import StructuredOutputsParams
from tests.runtime.fakes import EOS
from tests.runtime.test_structured_output import flags, generate, llm

__all__ = ["flags", "llm"]

AB = {"a": 20.0, "b": 20.0}
Wish = StructuredOutputsParams


def biased(**params: Any) -> SamplingParams:
    """Letters a and b, mostly."""
    bias = {ord(letter): bias for letter, bias in AB.items()}
    return SamplingParams(**{"max_tokens": 60, "logit_bias": bias, "seed": 5, **params})


def holds(output: CompletionOutput, word: str) -> bool:
    """Whether a word's tokens come one after the other; tokens that are no bytes have no text."""
    return word in "".join(map(chr, output.token_ids))


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 70])
def test_masks(vocab_size: int) -> None:
    params = SamplingParams(banned_token_ids=[0, 30])
    recent = Recent(Bans.of(params, [[1, 2], [3, 1, 30], [1, 2, 29]], vocab_size))
    expected = {*range(vocab_size)} - {0, 30}
    for token, now in [(5, set()), (1, {2}), (2, {29}), (3, set()), (1, {2, 30}), (1, {2})]:
        recent.add(token)
        mask = np.full(-(-vocab_size // 32), -1, np.int32)
        recent.apply(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert {*np.flatnonzero(bits).tolist()} == expected - now
    only = Bans.of(SamplingParams(allowed_token_ids=[3, 30]), [], vocab_size).left
    bits = np.unpackbits(only.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [3, 30]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_words_do_not_come(llm: LLM, temperature: float) -> None:
    free, held = generate(
        llm,
        biased(temperature=temperature),
        biased(temperature=temperature, bad_words=["aa", "bab"]),
    )
    assert holds(free, "aa") or holds(free, "bab")
    assert len(held.token_ids) == 60
    assert not holds(held, "aa")
    assert not holds(held, "bab")
    assert generate(llm, biased(temperature=temperature))[0].text == free.text


def test_words_do_not_come_in_any_of_several(llm: LLM) -> None:
    outputs = generate(llm, biased(n=3, bad_words=["ab"], logprobs=1, presence_penalty=0.1))
    assert not [output for output in outputs if holds(output, "ab")]
    assert len({output.text for output in outputs}) == 3


def test_words_do_not_come_in_a_form(llm: LLM) -> None:
    wish = Wish(regex="[ab]{20}")
    [output] = generate(llm, biased(structured_outputs=wish, bad_words=["aa", "bbb"]))
    assert output.finish_reason == "stop"
    assert len(output.text) == 20
    assert not holds(output, "aa")
    assert not holds(output, "bbb")


STUCK: dict[str, dict[str, Any]] = {
    "a token": {"structured_outputs": Wish(choice=["yes"]), "bad_words": ["e"]},
    "the first": {"structured_outputs": Wish(choice=["yes"]), "banned_token_ids": [ord("y")]},
    "a word": {"structured_outputs": Wish(choice=["yes", "yell"]), "bad_words": ["ye"]},
    "not allowed": {"structured_outputs": Wish(regex="a+b"), "allowed_token_ids": [ord("b")]},
    "no form": {"allowed_token_ids": [ord("a")], "bad_words": ["aa"]},
    "json": {"structured_outputs": Wish(json={"enum": ["ab"]}), "bad_words": ["ab"]},
    "the last of them": {"structured_outputs": Wish(regex="a"), "allowed_token_ids": [EOS]},
}


def check_stuck(output: CompletionOutput) -> None:
    assert (output.finish_reason, output.impossible) == ("error", True)
    assert "no token is left" in (output.error or "")


@pytest.mark.parametrize("name", STUCK)
def test_where_nothing_is_left_the_request_ends_alone(llm: LLM, name: str) -> None:
    fine = biased(structured_outputs=Wish(choice=["fine"]))
    alone = generate(llm, biased(**STUCK[name]))
    stuck, other = generate(llm, biased(**STUCK[name]), fine)
    check_stuck(alone[0])
    check_stuck(stuck)
    assert other.text == "fine"
    for output in generate(llm, biased(n=2, **STUCK[name])):
        check_stuck(output)


def test_where_the_form_may_end_it_does(llm: LLM) -> None:
    wish = Wish(regex="ab*")
    [output] = generate(
        llm, biased(structured_outputs=wish, bad_words=["bb"], banned_token_ids=[EOS])
    )
    assert (output.finish_reason, output.text) == ("stop", "ab")
    assert output.error is None


def test_other_rules_beside_a_form(llm: LLM) -> None:
    wish = Wish(regex="[a-d]{1,40}")
    allowed = [ord("c"), ord("d"), EOS]
    variants: list[dict[str, Any]] = [
        {"min_tokens": 30},
        {"logit_bias": {ord("c"): -100.0, EOS: 50.0}},
    ]
    for rules in variants:
        params = SamplingParams(
            structured_outputs=wish, allowed_token_ids=allowed, max_tokens=60, seed=2, **rules
        )
        [output] = generate(llm, params)
        assert output.finish_reason == "stop"
        assert {*output.text} <= {*"cd"}
        assert len(output.text) >= rules.get("min_tokens", 1)
