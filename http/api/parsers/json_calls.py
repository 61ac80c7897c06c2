"""Calls written as JSON: `{"name": ..., "arguments": {...}}`, or a name and then its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from paged.http.api.parsers.calls import Call, Format, NoCall, until
from paged.http.api.parsers.events import Tools
from paged.http.api.parsers.marks import WHITE_SPACE

_MISSING = object()
_ARGUMENTS = ("arguments", "parameters")


def _refuse_constant(name: str) -> NoReturn:
    raise NoCall(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def json_value(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at `start`, and where it ends. Raises NoCall."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise NoCall(str(error)) from None
    return value, end


def only_json(text: str) -> Any:
    """The JSON value that is all there is in `text`. Raises NoCall."""
    text = text.strip(WHITE_SPACE)
    value, end = json_value(text)
    if end != len(text):
        raise NoCall("more than JSON")
    return value


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that is all there is in `text`. Raises NoCall."""
    return _object(only_json(text))


def calls_of(value: Any, *, need_arguments: bool = True) -> list[Call]:
    """The calls in a JSON object, or in a list of them. Raises NoCall.

    Args:
        need_arguments: False where a call without them is one with none.
    """
    values = value if isinstance(value, list) else [value]
    return [_call_of(_object(each), need_arguments) for each in values]


def _call_of(value: dict[str, Any], need_arguments: bool) -> Call:
    name = value.get("name")
    given = next((value[key] for key in _ARGUMENTS if key in value), _MISSING)
    if given is _MISSING and not need_arguments:
        given = {}
    # Some models write the arguments as OpenAI's API has them, as JSON in a string.
    arguments = only_json(given) if isinstance(given, str) else given
    if not isinstance(name, str):
        raise NoCall("a call without a name")
    return Call(name, _object(arguments))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NoCall("no JSON object")
    return value


def json_end(text: str, fresh: int, start: int = 0) -> int | None:
    """Where the object or list ends that `text` holds from `start` on; None while it has not."""
    if "}" not in text[fresh:] and "]" not in text[fresh:]:
        return None
    start += len(text[start:]) - len(text[start:].lstrip(WHITE_SPACE))
    if text[start : start + 1] not in ("{", "["):
        return None
    try:
        return json_value(text, start)[1]
    except NoCall:
        return None


def _end_behind(*marks: str) -> Callable[[str, int], int | None]:
    """For `Format.end`: JSON behind one of the marks, and nothing to close it."""

    def end(text: str, fresh: int) -> int | None:
        mark = next(mark for mark in marks if text.startswith(mark))
        return json_end(text, fresh, len(mark))

    return end


def _inside(
    opens: str, closes: str, *, need_arguments: bool = False
) -> Callable[[str, Tools], list[Call]]:
    """For `Format.read`: JSON between two marks."""

    def read(text: str, tools: Tools) -> list[Call]:
        inner = text.removeprefix(opens).removesuffix(closes)
        return calls_of(only_json(inner), need_arguments=need_arguments)

    return read


def _between(opens: str, closes: str) -> Format:
    return Format((opens,), until(closes), _inside(opens, closes))


HERMES = _between("<tool_call>", "</tool_call>")
JAMBA = _between("<tool_calls>", "</tool_calls>")
INTERNLM = _between("<|action_start|><|plugin|>", "<|action_end|>")


def _read_bare(*marks: str) -> Callable[[str, Tools], list[Call]]:
    """For `Format.read`: JSON behind one of the marks."""

    def read(text: str, tools: Tools) -> list[Call]:
        mark = next(mark for mark in marks if text.startswith(mark))
        return calls_of(only_json(text.removeprefix(mark)))

    return read


def _behind(*marks: str) -> Format:
    return Format(marks, _end_behind(*marks), _read_bare(*marks))


GRANITE = _behind("<|tool_call|>", "<tool_call>")
PHI4_MINI = _behind("functools")


# Llama writes one object, or several with semicolons between them, and nothing else.
LLAMA3 = Format(
    ("{",),
    json_end,
    lambda text, tools: calls_of(only_json(text)),
    ignored=("<|python_tag|>",),
    alone=True,
    between=WHITE_SPACE + ";,",
)


_MISTRAL_MARK = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"(?P<name>[^\[{]*)(?:\[CALL_ID\](?P<id>[^\[{]*))?(?:\[ARGS\])?")


def _mistral_end(text: str, fresh: int) -> int | None:
    """A list of calls, or a name and an object."""
    start = len(_MISTRAL_MARK)
    if not text[start:].lstrip(WHITE_SPACE).startswith("["):
        start = text.find("{", start)
    return None if start < 0 else json_end(text, fresh, start)


def _read_mistral(text: str, tools: Tools) -> list[Call]:
    body = text.removeprefix(_MISTRAL_MARK).strip(WHITE_SPACE)
    if body.startswith("["):
        return calls_of(only_json(body))
    head = _MISTRAL_CALL.match(body)
    assert head is not None, "all of it is optional"
    name, call_id = head["name"].strip(WHITE_SPACE), head["id"]
    return [Call(name, json_object(body[head.end() :]), call_id and call_id.strip(WHITE_SPACE))]


MISTRAL = Format((_MISTRAL_MARK,), _mistral_end, _read_mistral)


_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_CALL = re.compile(
    r"(?:function<｜tool▁sep｜>(?P<fenced>[^\n]+)\n```json\n(?P<json>.*?)(?:\n```)?\s*"
    r"|(?P<name>[^<]+)<｜tool▁sep｜>(?P<arguments>.*))",
    re.DOTALL,
)


def _read_deepseek(text: str, tools: Tools) -> list[Call]:
    """V3 and R1 write a kind, a name and a fenced object; V3.1 writes a name and an object."""
    body = text.removeprefix(_DEEPSEEK_OPEN).removesuffix(_DEEPSEEK_CLOSE)
    call = _DEEPSEEK_CALL.fullmatch(body.strip(WHITE_SPACE))
    if call is None:
        raise NoCall("no name and arguments")
    name, arguments = call["fenced"] or call["name"], call["json"] or call["arguments"]
    return [Call(name.strip(WHITE_SPACE), json_object(arguments or ""))]


DEEPSEEK = Format(
    (_DEEPSEEK_OPEN,),
    until(_DEEPSEEK_CLOSE),
    _read_deepseek,
    ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)


_KIMI_OPEN, _KIMI_CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"


def _read_kimi(text: str, tools: Tools) -> list[Call]:
    """An id that holds the name, as `functions.clock:0`, and an object."""
    body = text.removeprefix(_KIMI_OPEN).removesuffix(_KIMI_CLOSE)
    call_id, mark, arguments = body.partition("<|tool_call_argument_begin|>")
    if not mark:
        raise NoCall("no arguments")
    call_id = call_id.strip(WHITE_SPACE)
    name = call_id.partition(":")[0].removeprefix("functions.")
    return [Call(name, json_object(arguments), call_id)]


KIMI_K2 = Format(
    (_KIMI_OPEN,),
    until(_KIMI_CLOSE),
    _read_kimi,
    ignored=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
