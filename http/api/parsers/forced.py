"""Calls that a request forces: what the answer must be, as a JSON schema, and how it is read then.

With `tool_choice` "required" the answer is a list of `{"name": ..., "parameters": {...}}`; with a
named function it is that function's arguments and nothing else. Both are pure JSON, whatever format
the model's own calls have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged.http.api.parsers.calls import NoCall
from paged.http.api.parsers.events import Arguments, CallStart, Content, Event, Tools
from paged.http.api.parsers.json_calls import calls_of, json_end, json_value
from paged.http.api.parsers.marks import WHITE_SPACE
from paged.runtime.errors import InvalidRequest

_DEFINITIONS = ("$defs", "definitions")
_BETWEEN = WHITE_SPACE + "[,]"

Schema = dict[str, Any]


def named_schema(parameters: Mapping[str, Any]) -> Schema:
    """What an answer must be that is one function's arguments: at least an object."""
    return {"type": "object", **parameters}


def required_schema(tools: Tools, *, parallel: bool = True) -> Schema:
    """What an answer must be that is a list of calls, of one alone unless `parallel`.

    Raises:
        InvalidRequest: two functions define the same name in different ways.
    """
    calls = [_call_schema(name, parameters) for name, parameters in tools.items()]
    schema: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    # References start at the root of the schema, so what they name has to move there.
    for word in _DEFINITIONS:
        if shared := _shared_definitions(tools, word):
            schema[word] = shared
    return schema


def _shared_definitions(tools: Tools, word: str) -> Schema:
    shared: Schema = {}
    for parameters in tools.values():
        own = parameters.get(word)
        for name, definition in own.items() if isinstance(own, dict) else ():
            if shared.setdefault(name, definition) != definition:
                raise InvalidRequest(f"The tools define {name!r} in different ways", "tools")
    return shared


def _call_schema(name: str, parameters: Mapping[str, Any]) -> Schema:
    own = {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
    properties = {"name": {"type": "string", "enum": [name]}, "parameters": named_schema(own)}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


class NamedParser:
    """Reads an answer that is one function's arguments: they are handed on as they come."""

    def __init__(self, name: str) -> None:
        self._start: list[Event] = [CallStart(name)]

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        start, self._start = self._start, []
        return [*start, Arguments(text)]

    def finish(self) -> list[Event]:
        return []


class RequiredParser:
    """Reads an answer that is a list of calls, each handed on when the whole of it is there.

    What is no call, as the rest of an answer that was cut, is content.
    """

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[Event]:
        fresh = len(self._text)
        self._text += text
        events: list[Event] = []
        while (call := self._next(fresh)) is not None:
            events += call
            fresh = 0
        return events

    def finish(self) -> list[Event]:
        rest = self._text.strip(_BETWEEN)
        return [Content(rest)] if rest else []

    def _next(self, fresh: int) -> list[Event] | None:
        start = len(self._text) - len(self._text.lstrip(_BETWEEN))
        end = json_end(self._text, fresh, start)
        if end is None:
            return None
        whole, self._text = self._text[start:end], self._text[end:]
        try:
            return [event for call in calls_of(json_value(whole)[0]) for event in call.events()]
        except NoCall:
            return [Content(whole)]
