"""What outputs may be asked to be, each with a check that knows nothing of how it is enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from paged.runtime.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class Case:
    """A wish, and whether a text fulfils it."""

    params: StructuredOutputsParams
    fulfils: Callable[[str], bool]


def satisfies(schema: dict[str, Any], text: str) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


def schema_case(schema: dict[str, Any], **options: Any) -> Case:
    params = StructuredOutputsParams(json=schema, **options)
    return Case(params, lambda text: satisfies(schema, text))


def regex_case(pattern: str) -> Case:
    params = StructuredOutputsParams(regex=pattern)
    return Case(params, lambda text: re.fullmatch(pattern, text) is not None)


def choice_case(*choices: str) -> Case:
    return Case(StructuredOutputsParams(choice=list(choices)), lambda text: text in choices)


def grammar_case(grammar: str, pattern: str) -> Case:
    params = StructuredOutputsParams(grammar=grammar)
    return Case(params, lambda text: re.fullmatch(pattern, text) is not None)


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NAME = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TREE = {
    "type": "object",
    "properties": {"value": DIGIT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/end"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
    "$defs": {"end": record(value=DIGIT)},
}
# Without bounds a random model goes on until it is cut off.
CASES: dict[str, Case] = {
    "text": schema_case({"type": "string", "maxLength": 10}),
    "integer": schema_case({"type": "integer", "minimum": -5, "maximum": 1200}),
    "number": schema_case({"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 1}),
    "boolean": schema_case({"type": "boolean"}),
    "null": schema_case({"type": "null"}),
    "enum": schema_case({"enum": ["red", "grün", 3, None, True]}),
    "const": schema_case({"const": {"a": [1, "b"]}}),
    "record": schema_case(record(name=NAME, age=DIGIT)),
    "array": schema_case({"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 5}),
    "any of": schema_case(
        {"anyOf": [DIGIT, NAME, {"type": "array", "items": DIGIT, "maxItems": 2}]}
    ),
    "pattern": schema_case(record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"})),
    "date": schema_case(record(day={"type": "string", "format": "date"})),
    "nested": schema_case(record(outer=record(inner=record(flag={"type": "boolean"})))),
    "references": schema_case(TREE),
    "no spaces": schema_case(record(a=DIGIT, b=DIGIT), disable_any_whitespace=True),
    "own spaces": schema_case(record(a=DIGIT, b=DIGIT), whitespace_pattern=" "),
    "phone": regex_case(r"\d{3}-\d{4}"),
    "words": regex_case(r"(yes|no|maybe)( indeed){0,2}[.!]"),
    "unicode": regex_case(r"[äöü]{1,3}你?"),
    "choice": choice_case("positive", "negative", 'not "sure"\n'),
    "prefixes": choice_case("a", "ab", "abc"),
    "lark": grammar_case('start: NUM "+" NUM\nNUM: /[0-9]{1,3}/', r"\d{1,3}\+\d{1,3}"),
    "gbnf": grammar_case(
        'root ::= "(" item ("," item)? ")"\nitem ::= [a-c]', r"\([a-c](,[a-c])?\)"
    ),
}
