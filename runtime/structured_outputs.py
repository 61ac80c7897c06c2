"""What a request wants its output to be: JSON, a match of a pattern, a choice, a grammar's text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from paged.runtime.errors import InvalidRequest

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_JSON = ("json", "json_object", "structural_tag")
_ABOUT_JSON = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first six says what the output must be, from its first token on.

    Attributes:
        json: a JSON schema, as a dict or as text, that the output must satisfy.
        regex: a regular expression that the whole output must match. No look-around; \\d, \\w and
            \\s are those of ASCII.
        choice: texts of which the output must be one.
        grammar: a context-free grammar in Lark's notation or in llama.cpp's (GBNF).
        json_object: any JSON object.
        structural_tag: several parts, such as free text in which calls keep to their schemas: a
            dict or text in xgrammar's notation, see `paged.runtime.structural_tags`.
        disable_any_whitespace: JSON without spaces and line breaks between its parts.
        whitespace_pattern: a regular expression of the white space between the parts of JSON;
            default up to 32 spaces, tabs and line breaks in one place.
        disable_additional_properties: objects of a JSON schema that lists their properties have no
            others, unless it says itself whether they may.

    Raises:
        InvalidRequest: none or several are given, or a value is of the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise _invalid(
                f"takes exactly one of {', '.join(_KINDS)}; got {' and '.join(given) or 'none'}"
            )
        _check_types(self)
        styles = [name for name in _ABOUT_JSON if getattr(self, name) not in (None, False)]
        if styles and self.kind not in _JSON:
            raise _invalid(f"{styles[0]} is about JSON, and {self.kind} is none")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _invalid("give disable_any_whitespace or whitespace_pattern, not both")

    @property
    def kind(self) -> str:
        """The one that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    def preceded_by(self, before: dict[str, Any]) -> StructuredOutputsParams:
        """The same behind something else, which is a part of a structural tag.

        Raises:
            InvalidRequest: a text that ought to be JSON is not.
        """
        elements = [before, self._as_part()]
        return StructuredOutputsParams(
            structural_tag={"format": {"type": "sequence", "elements": elements}},
            **{name: getattr(self, name) for name in _ABOUT_JSON},
        )

    def _as_part(self) -> dict[str, Any]:
        """It as a part of a structural tag."""
        match self.kind:
            case "regex":
                return {"type": "regex", "pattern": self.regex}
            case "grammar":
                return {"type": "grammar", "grammar": self.grammar}
            case "choice":
                texts = [{"type": "const_string", "value": each} for each in self.choice or ()]
                return {"type": "or", "elements": texts}
            case "structural_tag":
                return {**_read("structural_tag", self.structural_tag), "type": "structural_tag"}
        schema = {"type": "object"} if self.json_object else _read("json", self.json)
        return {"type": "json_schema", "json_schema": schema}


def _read(name: str, value: str | dict[str, Any] | None) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _invalid(f"{name} is no JSON: {error}") from None


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs: {reason}", "structured_outputs")


def _check_types(params: StructuredOutputsParams) -> None:
    def check(name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise _invalid(f"{name} must be {wanted}, got {type(getattr(params, name)).__name__}")

    check("json", isinstance(params.json, str | dict | None), "a JSON schema, a dict or text")
    tag = params.structural_tag
    check("structural_tag", isinstance(tag, str | dict | None), "a structural tag, a dict or text")
    for name in ("regex", "grammar", "whitespace_pattern"):
        check(name, isinstance(getattr(params, name), str | None), "text")
    choice = params.choice
    texts = choice is None or (
        isinstance(choice, list) and bool(choice) and all(isinstance(each, str) for each in choice)
    )
    check("choice", texts, "a list of at least one text")
    check("json_object", isinstance(params.json_object, bool | None), "true or false")
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        check(name, isinstance(getattr(params, name), bool), "true or false")
