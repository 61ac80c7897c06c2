"""From wishes to grammars, their refusals, and masks against a plain reading of the grammar."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from paged.runtime.errors import InvalidRequest
from paged.runtime.grammar import MAX_GRAMMAR_LENGTH, grammar_of
from paged.runtime.guides import Grammars, Guide
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.structured_outputs import StructuredOutputsParams
from tests.runtime import fakes
from tests.runtime.structured_cases import CASES

TOKENIZER = fakes.byte_tokenizer()


def grammar(**wish: Any) -> str:
    return grammar_of(StructuredOutputsParams(**wish), TOKENIZER, fakes.VOCAB_SIZE)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({}, "exactly one of .* got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json_object": False}, "got none"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": "ab"}, "choice must be a list"),
        ({"json": 3}, "json must be a JSON schema"),
        ({"regex": ["a"]}, "regex must be text, got list"),
        ({"structural_tag": ["a"]}, "structural_tag must be a structural tag"),
        ({"whitespace_pattern": " "}, "got none"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is about JSON"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "whitespace is about JSON"),
        ({"grammar": "b", "disable_additional_properties": True}, "properties is about JSON"),
        (
            {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "or whitespace_pattern, not both",
        ),
        ({"json": {}, "disable_any_whitespace": 1}, "must be true or false, got int"),
        ({"json": "{"}, "JSON schema cannot be enforced"),
        ({"json": "[]"}, "JSON schema cannot be enforced"),
        ({"json": {"type": "strong"}}, "Invalid type: strong"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "https://example.com/schema"}}, "does not fetch"),
        ({"json": {"a": {1, 2}}}, "not JSON serializable"),
        ({"json": {"enum": ["x" * MAX_GRAMMAR_LENGTH]}}, f"{MAX_GRAMMAR_LENGTH} are allowed"),
        ({"json_object": True, "whitespace_pattern": "("}, "white space of JSON cannot be"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"grammar": "start: nowhere"}, "unknown name"),
        ({"grammar": "root ::= ("}, "grammar cannot be enforced"),
        ({"grammar": "start: <|nobody|>"}, "unknown special token"),
        ({"grammar": "start: <[300]>"}, "too large"),
    ],
)
def test_what_cannot_be_enforced_is_refused(wish: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        grammar(**wish)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 600


def test_sampling_parameters_take_nothing_else() -> None:
    with pytest.raises(InvalidRequest, match="must be StructuredOutputsParams, got dict"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wish",
    [
        {"json": {"enum": [f"value {number}" for number in range(5000)]}},
        {"json": {"allOf": [{"anyOf": [{"minLength": i}] * 4} for i in range(8)]}},
        {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(500)}}},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"regex": "(([a-z]{1,200}){1,200}){1,200}"},
        {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
        {"choice": [f"choice number {number}" for number in range(3000)]},
    ],
)
def test_large_wishes_are_checked_or_refused_in_time(wish: dict[str, Any]) -> None:
    started = time.perf_counter()
    with suppress(InvalidRequest):
        compile_here(grammar(**wish))
    assert time.perf_counter() - started < 20


def compile_here(text: str, vocab_size: int = fakes.VOCAB_SIZE) -> tuple[Grammars, Guide]:
    grammars = Grammars(lambda: TOKENIZER, vocab_size, frozenset({fakes.EOS}))
    guide = Guide(grammars.compile(text))
    assert not guide.error
    return grammars, guide


def allowed(grammars: Grammars, *guides: Guide) -> list[set[int]]:
    masks = grammars.masks(guides)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


@pytest.mark.parametrize("vocab_size", [257, 258, 287, 288, 289, 300])
def test_masks_allow_what_can_still_become_a_match(vocab_size: int) -> None:
    # What may come after each text, by hand; 256 is the end of the sequence.
    expected = {
        "": {*b"ab"},
        "a": {*b"ab", 256},
        "ab": {*b"c"},
        "abc": {256},
    }
    text_of = grammar(regex="a(bc)?|bc|aa")
    grammars, _ = compile_here(text_of, vocab_size)
    guides = []
    for text in expected:
        guides.append(Guide(grammars.compile(text_of)))
        for byte in text.encode():
            guides[-1].advance(byte)
    assert allowed(grammars, *guides) == list(expected.values())
    assert [guide.is_complete for guide in guides] == [False, False, False, True]


@pytest.mark.parametrize("name", ["phone", "words", "choice", "prefixes", "gbnf", "lark"])
def test_the_end_is_allowed_exactly_where_the_text_is_a_match(name: str) -> None:
    case, random = CASES[name], np.random.default_rng(0)
    text_of = grammar_of(case.params, TOKENIZER, fakes.VOCAB_SIZE)
    for _ in range(5):
        grammars, guide = compile_here(text_of)
        text = b""
        while not guide.is_complete:
            [tokens] = allowed(grammars, guide)
            assert (fakes.EOS in tokens) == case.fulfils(text.decode())
            token = int(random.choice(sorted(tokens - {fakes.EOS})))
            guide.advance(token)
            text += bytes([token])
        assert case.fulfils(text.decode())


def test_special_tokens_and_unknown_ids_never_come() -> None:
    grammars, guide = compile_here(grammar(regex=r"(?s:.)*"))
    [tokens] = allowed(grammars, guide)
    assert tokens <= {*range(258)}
    assert fakes.EOS in tokens


def test_the_same_grammar_is_compiled_once_and_followed_apart() -> None:
    grammars, first = compile_here(grammar(regex="ab"))
    compiled = grammars.compile(grammar(regex="ab"))
    assert compiled is grammars.compile(grammar(regex="ab"))
    second = Guide(compiled)
    first.advance(ord("a"))
    assert allowed(grammars, first, second) == [{ord("b")}, {ord("a")}]


def test_a_token_that_may_not_come_is_an_error() -> None:
    _, guide = compile_here(grammar(regex="ab"))
    guide.advance(ord("x"))
    assert guide.is_complete
    assert guide.error


def test_digits_words_and_spaces_are_those_of_ascii() -> None:
    grammars, guide = compile_here(grammar(regex=r"\d"))
    assert allowed(grammars, guide) == [{*b"0123456789"}]
    assert re.fullmatch(r"\d", "٣")  # unlike Python's


def test_white_space_in_json_is_bounded() -> None:
    grammars, guide = compile_here(grammar(json_object=True))
    guide.advance(ord("{"))
    for _ in range(32):
        [tokens] = allowed(grammars, guide)
        assert ord(" ") in tokens
        guide.advance(ord(" "))
    assert allowed(grammars, guide) == [{*b'"}'}]


def follows(text_of: str, text: str) -> bool | None:
    """Whether a text is all that a grammar asks for; None if it is the beginning of that."""
    _, guide = compile_here(text_of)
    for byte in text.encode():
        if guide.is_complete:
            return False
        guide.advance(byte)
        if guide.error:
            return False
    return guide.may_end or None


@pytest.mark.parametrize(
    ("day", "exists"),
    [
        *[("2024-02-29", True), ("2023-02-29", False), ("2000-02-29", True), ("1900-02-29", False)],
        *[("2023-02-28", True), ("2023-12-31", True), ("2023-11-31", False), ("0000-01-01", False)],
    ],
)
def test_days_are_those_of_the_calendar(day: str, exists: bool) -> None:
    wanted: dict[str, Any] = {"type": "string", "format": "date"}
    assert follows(grammar(json=wanted), f'"{day}"') is exists
    moment = {"properties": {"date": wanted | {"format": "date-time"}}, "required": ["date"]}
    assert follows(grammar(json=moment), f'{{"date":"{day}T10:11:12Z"}}') is exists
    early = wanted | {"allOf": [{"pattern": "^[01]"}]}
    assert follows(grammar(json=early), f'"{day}"') is (exists and day[0] in "01")


def test_values_that_look_like_schemas_stay() -> None:
    value = {"format": "date", "properties": {"a": {}}}
    text = '{"format":"date","properties":{"a":{}}}'
    wish = {"json": {"enum": [value]}, "disable_additional_properties": True}
    assert follows(grammar(**wish), text)


def test_additional_properties_can_be_switched_off() -> None:
    inner = {"type": "object", "properties": {"b": {}}}
    properties = {
        "a": inner,
        "free": {"type": "object"},
        "said": inner | {"additionalProperties": True},
    }
    schema = {"type": "object", "properties": properties}
    closed = grammar(json=schema, disable_additional_properties=True)
    for text, fits in [
        ('{"a":{"b":1}}', True),
        ('{"c":1}', False),
        ('{"a":{"c":1}}', False),
        ('{"free":{"c":1}}', True),
        ('{"said":{"c":1}}', True),
    ]:
        assert follows(closed, text) is fits
        assert follows(grammar(json=schema), text)
