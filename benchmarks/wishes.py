"""Forms that answers are asked to have, each with a check that knows nothing of how it is enforced.

Twenty JSON schemas that together use what schemas are made of, and texts by patterns, choices and
grammars. Most have bounds: a model without aim fills what has none until it is cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]

FORMATS = FormatChecker(("date", "email", "ipv4", "ipv6", "regex", "uuid"))
_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
)


@FORMATS.checks("time")
def _is_time(value: object) -> bool:
    """A time of RFC 3339, which the library leaves to other packages."""
    return not isinstance(value, str) or _TIME.fullmatch(value) is not None


@FORMATS.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    return bool(date.fromisoformat(value[:10])) and value[10:11] in "tT" and _is_time(value[11:])


@dataclass(frozen=True)
class Wish:
    """A form.

    Attributes:
        kind: json, regex, choice or grammar, as in `structured_outputs`.
        value: the schema, pattern, choices or grammar.
        fulfils: whether a text has the form.
    """

    kind: str
    value: Any
    fulfils: Callable[[str], bool]

    def fields(self, way: int) -> dict[str, Any]:
        """The request fields that ask for it, in one of the ways that there are."""
        fields: list[dict[str, Any]] = [
            {"structured_outputs": {self.kind: self.value}},
            {f"guided_{self.kind}": self.value},
        ]
        if self.kind == "json":
            schema = {"name": "wish", "schema": self.value}
            fields.append({"response_format": {"type": "json_schema", "json_schema": schema}})
        return fields[way % len(fields)]


def record(properties: Schema, *optional: str, **further: Any) -> Schema:
    """An object of these properties and no others, all required but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **further,
    }


def array(items: Schema, most: int, least: int = 0) -> Schema:
    """A bounded list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(most: int, least: int = 0) -> Schema:
    """A bounded string."""
    return {"type": "string", "minLength": least, "maxLength": most}


NAME, FLAG = text(12, 1), {"type": "boolean"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: dict[str, Schema] = {
    "nested": record(
        {
            "name": NAME,
            "address": record({"street": text(20), "geo": record({"north": FLAG, "east": FLAG})}),
        }
    ),
    "enum": record({"colour": {"enum": ["red", "grün", 3, None, True, [1], {"a": "b"}]}}),
    "references": record(
        {"left": {"$ref": "#/$defs/point"}, "right": {"$ref": "#/$defs/point"}},
        **{"$defs": {"point": record({"x": DIGIT, "y": {"$ref": "#/$defs/y"}}), "y": DIGIT}},
    ),
    "recursive": record({"value": DIGIT, "children": array({"$ref": "#"}, 2)}),
    "list": {
        "$ref": "#/definitions/node",
        "definitions": {
            "node": record(
                {
                    "value": FLAG,
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/definitions/node"}]},
                }
            )
        },
    },
    "patterns": record(
        {
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
            "word": {"type": "string", "pattern": "^(ab|cd)+$", "maxLength": 8},
            "inner": {"type": "string", "pattern": "x", "maxLength": 6},
        }
    ),
    "formats": record(
        {
            "day": {"type": "string", "format": "date"},
            "moment": {"type": "string", "format": "date-time"},
            "time": {"type": "string", "format": "time"},
            "id": {"type": "string", "format": "uuid"},
            "host": {"type": "string", "format": "ipv4"},
        }
    ),
    "email": record(
        {
            "mail": {"type": "string", "format": "email"},
            "host": {"type": "string", "format": "ipv6"},
        }
    ),
    "arrays": record(
        {
            "digits": array(DIGIT, 5, 2),
            "rows": array(array(FLAG, 2, 1), 3, 1),
            "pair": {
                "type": "array",
                "prefixItems": [NAME, DIGIT],
                "items": False,
                "minItems": 2,
            },
        }
    ),
    "integers": record(
        {
            "small": {"type": "integer", "minimum": -5, "maximum": 1200},
            "between": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 1000},
            "even": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 4},
        }
    ),
    "numbers": record(
        {
            "share": {"type": "number", "minimum": 0, "maximum": 1},
            "open": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
            "step": {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5},
        }
    ),
    "any of": {"anyOf": [DIGIT, NAME, array(DIGIT, 2), record({"it": {"type": "null"}})]},
    "const": record({"version": {"const": {"a": [1, "b", None]}}, "tag": {"const": 'x\n"y"'}}),
    "unicode": record({"größe": DIGIT, "名前": {"enum": ["猫", "犬"]}, "😀": FLAG, 'a"b': FLAG}),
    "additional": {
        "type": "object",
        "properties": {"first": DIGIT},
        "required": ["first"],
        "additionalProperties": FLAG,
        "maxProperties": 4,
    },
    "optional": record({"a": DIGIT, "b": FLAG, "c": NAME, "d": DIGIT}, "a", "c", "d"),
    "one of": {
        "oneOf": [
            record({"kind": {"const": "circle"}, "radius": DIGIT}),
            record({"kind": {"const": "square"}, "side": DIGIT}),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": ["string", "null"], "maxLength": 5}}},
            {"required": ["b"]},
        ],
        "properties": {"a": {}, "b": {}},
        "additionalProperties": False,
    },
    "open": {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]},
    "keys by pattern": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": DIGIT, "^s_[a-z]{1,3}$": NAME},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
}
PATTERNS = {
    "phone": r"\(?[0-9]{3}\)?-[0-9]{4}",
    "verdict": r"(yes|no|maybe)( indeed){0,2}[.!]",
    "letters": r"[äöü]{1,3}你?",
    "number": r"[1-9][0-9]{0,6}(\.[0-9]{1,2})? (EUR|USD)",
}
CHOICES = (["positive", "negative", "neutral"], ["a", "ab", "abc"], ['not "sure"\n', "grün"])
SUM = r"\d{1,3}( [+*] \d{1,3}){0,3}"
GRAMMARS = {
    'start: NUM (" " OP " " NUM){0,3}\nOP: "+" | "*"\nNUM: /[0-9]{1,3}/': SUM,
    'root ::= "(" item ("," item)? ")"\nitem ::= [a-c]': r"\([a-c](,[a-c])?\)",
}


def satisfies(schema: Schema, text: str) -> bool:
    """Whether a text is JSON that the schema allows, formats included."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return Draft202012Validator(schema, format_checker=FORMATS).is_valid(value)


def _json(schema: Schema) -> Wish:
    return Wish("json", schema, lambda text: satisfies(schema, text))


def _matching(kind: str, value: str, pattern: str) -> Wish:
    return Wish(kind, value, lambda text: re.fullmatch(pattern, text) is not None)


def _choice(choices: list[str]) -> Wish:
    return Wish("choice", choices, lambda text: text in choices)


WISHES: dict[str, Wish] = {
    **{name: _json(schema) for name, schema in SCHEMAS.items()},
    **{name: _matching("regex", pattern, pattern) for name, pattern in PATTERNS.items()},
    **{f"choice {i}": _choice(choices) for i, choices in enumerate(CHOICES)},
    **{f"grammar {i}": _matching("grammar", *pair) for i, pair in enumerate(GRAMMARS.items())},
}
