"""What a request wants its output to be: JSON, a match of a pattern, a choice, a grammar's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paged.runtime.errors import InvalidRequest, Unsupported

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first five says what the output must be, from its first token on.

    Attributes:
        json: a JSON schema, as a dict or as text, that the output must satisfy.
        regex: a regular expression that the whole output must match. No look-around; \\d, \\w and
            \\s are those of ASCII.
        choice: texts of which the output must be one.
        grammar: a context-free grammar in Lark's notation or in llama.cpp's (GBNF).
        json_object: any JSON object.
        disable_any_whitespace: JSON without spaces and line breaks between its parts.
        whitespace_pattern: a regular expression of the white space between the parts of JSON;
            default up to 32 spaces, tabs and line breaks in one place.
        structural_tag: not supported.
        disable_additional_properties: not supported; "additionalProperties" in the schema is.

    Raises:
        InvalidRequest: none or several are given, or a value is of the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        for name in ("structural_tag", "disable_additional_properties"):
            if getattr(self, name):
                raise Unsupported(f"structured_outputs: {name} is not supported", name)
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs takes exactly one of {', '.join(_KINDS)}; got "
                f"{' and '.join(given) or 'none'}",
                "structured_outputs",
            )
        _check_types(self)

    @property
    def kind(self) -> str:
        """The one that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))


def _check_types(params: StructuredOutputsParams) -> None:
    def check(name: str, ok: bool, wanted: str) -> None:
        if not ok:
            found = type(getattr(params, name)).__name__
            raise InvalidRequest(
                f"structured_outputs: {name} must be {wanted}, got {found}", "structured_outputs"
            )

    check("json", isinstance(params.json, str | dict | None), "a JSON schema, a dict or text")
    for name in ("regex", "grammar", "whitespace_pattern"):
        check(name, isinstance(getattr(params, name), str | None), "text")
    choice = params.choice
    texts = choice is None or (
        isinstance(choice, list) and bool(choice) and all(isinstance(each, str) for each in choice)
    )
    check("choice", texts, "a list of at least one text")
    check("json_object", isinstance(params.json_object, bool | None), "true or false")
