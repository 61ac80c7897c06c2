"""Structural tags: which texts they allow, and which they refuse to be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paged.runtime.errors import InvalidRequest
from paged.runtime.grammar import grammar_of
from paged.runtime.structured_outputs import StructuredOutputsParams
from tests.runtime import fakes
from tests.runtime.test_grammar import compile_here

TOKENIZER = fakes.byte_tokenizer()
USER = TOKENIZER.encode("<user>", add_special_tokens=False)
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
A = {"begin": "<f=a>", "content": INTEGER, "end": "</f>"}
B = {"begin": "<f=b>", "content": {"type": "any_text"}, "end": ["</f>", "END"]}
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B]}
LIST = {"type": "tags_with_separator", "tags": [A, B], "separator": ", "}
FREE = {"type": "any_text"}
ONE, MORE = {"stop_after_first": True}, {"at_least_one": True}
TAG = {"type": "tag"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def several(kind: str, *elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "elements": list(elements)}


def one(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "content": content}


def grammar(format: Any) -> str:
    params = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": format})
    return grammar_of(params, TOKENIZER, fakes.VOCAB_SIZE)


def check(text_of: str, output: str, state: str) -> None:
    """Special tokens in the output are tokens."""
    _, guide = compile_here(text_of)
    for token in TOKENIZER.encode(output, add_special_tokens=False):
        if guide.is_complete:
            assert state == "refused"
            return
        guide.advance(token)
        if guide.error:
            assert state == "refused"
            return
    assert state == ("whole" if guide.may_end else "begun")


CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    (text("a<user>b"), {"a<user>b": "whole", "a<user>": "begun", "ab": "refused"}),
    (FREE, {"": "whole", "what\never": "whole", "<user>": "refused"}),
    (FREE | {"excludes": ["a\n/", "cd"]}, {"a\n": "whole", "a\n/": "refused", "xcd": "refused"}),
    (INTEGER, {"12": "whole", "a": "refused"}),
    ({"type": "regex", "pattern": r"a+\d"}, {"aa1": "whole", "1": "refused"}),
    ({"type": "grammar", "grammar": 'start: "x" | "y" start'}, {"yyx": "whole", "z": "refused"}),
    (several("sequence", text("a"), INTEGER), {"a1": "whole", "a": "begun", "1": "refused"}),
    (several("or", text("a"), INTEGER), {"a": "whole", "1": "whole", "a1": "refused"}),
    (one("optional", text("a")), {"": "whole", "a": "whole", "aa": "refused"}),
    (one("star", text("ab")), {"": "whole", "abab": "whole", "aba": "begun"}),
    (one("plus", text("ab")), {"": "begun", "abab": "whole"}),
    (TAG | A, {"<f=a>7</f>": "whole", "<f=a>": "begun", "x": "refused"}),
    (TAG | B, {"<f=b>7</f>": "whole", "<f=b>ENEND": "whole", "<f=b></f>x": "refused"}),
    (TAG | A | {"end": "<user>"}, {"<f=a>7<user>": "whole", "<f=a>7": "begun"}),
    (TAG | B | {"end": "<user>!"}, {"<f=b>x<user>!": "whole", "<f=b>x<user>x": "refused"}),
    (TAG | B | {"end": ""}, {"<f=b>x</f>": "whole"}),
    (
        CALLS,
        {
            "": "whole",
            "hm <f": "whole",
            "hm <f=": "begun",
            "hm <f=c": "refused",
            "hm <f=a>x": "refused",
            "<f=a>1</f> or <f=b>2</f>.": "whole",
        },
    ),
    (CALLS | MORE, {"": "begun", "hm": "refused", "<f=a>1</f> or <f=b>2</f>.": "whole"}),
    (CALLS | ONE, {"": "whole", "hm <f=a>1</f>": "whole", "<f=a>1</f>.": "refused"}),
    (CALLS | ONE | MORE, {"": "begun", "hm": "refused", "<f=a>1</f>": "whole"}),
    (CALLS | {"triggers": ["<f=a", "<f=b"]}, {"<f=a>1</f>": "whole", "<f=c": "whole"}),
    (LIST, {"": "whole", "<f=a>1</f>, <f=b></f>": "whole", "<f=a>1</f>, ": "begun"}),
    (LIST | MORE, {"": "begun", "<f=a>1</f>": "whole"}),
    (LIST | ONE, {"": "whole", "<f=a>1</f>": "whole", "<f=a>1</f>,": "refused"}),
    ({"type": "structural_tag", "format": INTEGER}, {"1": "whole"}),
]


@pytest.mark.parametrize(("format", "outputs"), CASES)
def test_what_may_be_said(format: dict[str, Any], outputs: dict[str, str]) -> None:
    text_of = grammar(format)
    for output, state in outputs.items():
        check(text_of, output, state)


def test_the_older_form() -> None:
    tag = {
        "triggers": ["<f="],
        "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    }
    params = StructuredOutputsParams(structural_tag=json.dumps(tag))
    text_of = grammar_of(params, TOKENIZER, fakes.VOCAB_SIZE)
    check(text_of, "so <f=a>1</f>.", "whole")
    check(text_of, "so <f=a>b", "refused")


def test_white_space_and_other_properties() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"]}
    wanted = {"format": {"type": "json_schema", "json_schema": schema}}
    styles: list[dict[str, Any]] = [
        {"disable_any_whitespace": True},
        {"disable_additional_properties": True},
    ]
    for style in styles:
        params = StructuredOutputsParams(structural_tag=wanted, **style)
        text_of = grammar_of(params, TOKENIZER, fakes.VOCAB_SIZE)
        check(text_of, '{"a":1}', "whole")
        check(text_of, '{"a": 1, "b": 2}', "refused")


def deep(levels: int) -> dict[str, Any]:
    nested = text("a")
    for _ in range(levels):
        nested = one("optional", nested)
    return nested


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        (3, "format must be an object"),
        ({"type": "qwen_xml_parameter"}, "type must be one of .* got 'qwen_xml_parameter'"),
        ({"type": "const_string"}, "format.value must be a text"),
        ({"type": "json_schema"}, "format.json_schema is required"),
        ({"type": "json_schema", "json_schema": {"type": "odd"}}, "Invalid type: odd"),
        ({"type": "regex", "pattern": "("}, "unclosed group"),
        ({"type": "grammar", "grammar": "start: <|nobody|>"}, "unknown special token"),
        (several("or"), "elements must be a list that is not empty"),
        (several("or", text("a"), {}), r"elements\[1\].type must be one of"),
        (several("sequence", FREE, text("a")), r"elements\[0\] is free text without an end"),
        (several("sequence", several("or", CALLS), text("a")), "free text without an end"),
        (one("plus", FREE), "content is free text without an end"),
        (TAG | A | {"content": CALLS}, "content is free text without an end"),
        (TAG | {"begin": "a", "content": FREE}, "end must be a list"),
        (CALLS | {"triggers": ["x"]}, "has 0 of the triggers"),
        (CALLS | {"triggers": ["<", "<f"]}, "has 2 of the triggers"),
        (CALLS | {"triggers": [""]}, "triggers must hold texts"),
        (CALLS | {"excludes": ["x"]}, "excludes is not supported"),
        ({"type": "structural_tag"}, 'must hold a "format"'),
        ({"type": "structural_tag", "structures": [{}], "triggers": ["a"]}, "schema is required"),
        (deep(20_000), "recursion"),
        (deep(300), "cannot be enforced"),
    ],
)
def test_refusals(format: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        grammar(format)
    assert caught.value.param == "structured_outputs"
