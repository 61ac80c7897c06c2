"""Calls whose arguments are written one by one between tags, each value as plain text.

What a value is, a text or a number or a list, is told by the function's schema alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from paged.http.api.parsers.calls import Call, Format, NoCall, until
from paged.http.api.parsers.events import Tools
from paged.http.api.parsers.json_calls import only_json
from paged.http.api.parsers.marks import WHITE_SPACE

# As Python writes them, which models do too.
_PYTHONS = {"True": True, "False": False, "None": None}
_NUMBERED = ("anyOf", "oneOf", "allOf")


def typed(text: str, schema: Any) -> Any:
    """A value of the kind that the schema asks for; the text itself if it is none of those."""
    kinds = kinds_of(schema)
    if kinds == {"string"}:
        return text
    bare = text.strip(WHITE_SPACE)
    if "string" in kinds:
        return None if bare in ("null", "None") and "null" in kinds else text
    if bare in _PYTHONS:
        return _PYTHONS[bare]
    try:
        return only_json(bare)
    except NoCall:
        return text


def kinds_of(schema: Any) -> set[str]:
    """The JSON types that a schema names; none if it leaves them open."""
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    kinds = {own} if isinstance(own, str) else set()
    if isinstance(own, list):
        kinds = {kind for kind in own if isinstance(kind, str)}
    for word in _NUMBERED:
        inner = schema.get(word)
        kinds |= {k for each in inner for k in kinds_of(each)} if isinstance(inner, list) else set()
    return kinds


def _call(name: str, values: Iterable[tuple[str, str]], tools: Tools) -> Call:
    name = name.strip(WHITE_SPACE)
    properties = tools.get(name, {}).get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    return Call(name, {key: typed(text, schemas.get(key)) for key, text in values})


def _without_line_ends(text: str) -> str:
    """A value stands on lines of its own, whose ends are not part of it."""
    return text.removeprefix("\n").removesuffix("\n")


_QWEN_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
# The closing tag is forgotten at times: the next tag closes a value as well.
_QWEN_VALUE = re.compile(
    r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)


def _read_qwen(text: str, tools: Tools) -> list[Call]:
    function = _QWEN_FUNCTION.fullmatch(text)
    if function is None:
        raise NoCall("no function")
    values = [(key, _without_line_ends(text)) for key, text in _QWEN_VALUE.findall(function[2])]
    return [_call(function[1], values, tools)]


# The outer tags may be missing, and say nothing that the inner ones do not.
QWEN3_XML = Format(
    ("<function=",),
    until("</function>"),
    _read_qwen,
    ignored=("<tool_call>", "</tool_call>"),
)


_GLM_NAME = re.compile(r"<tool_call>\s*([^<\n]+)\s*(?=<arg_key>|</tool_call>)")
_GLM_VALUE = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_glm(text: str, tools: Tools) -> list[Call]:
    name = _GLM_NAME.match(text)
    if name is None or not text.endswith("</tool_call>"):
        raise NoCall("no name, or no end")
    values = [(key.strip(WHITE_SPACE), value) for key, value in _GLM_VALUE.findall(text)]
    return [_call(name[1], values, tools)]


GLM45 = Format(("<tool_call>",), until("</tool_call>"), _read_glm)


_INVOKE = re.compile(
    r"<(?:｜DSML｜)?invoke name=\"?([^\">]+)\"?>(.*)</(?:｜DSML｜)?invoke>", re.DOTALL
)
_INVOKE_VALUE = re.compile(
    r"<(?:｜DSML｜)?parameter name=\"?([^\">]+)\"?(?: string=\"(true|false)\")?>(.*?)"
    r"</(?:｜DSML｜)?parameter>",
    re.DOTALL,
)


def _read_invoke(text: str, tools: Tools) -> list[Call]:
    """MiniMax leaves the kind of a value to the schema; DeepSeek says whether it is a string."""
    function = _INVOKE.fullmatch(text)
    if function is None:
        raise NoCall("no function")
    values = _INVOKE_VALUE.findall(function[2])
    call = _call(function[1], ((key, _without_line_ends(text)) for key, _, text in values), tools)
    strings = {key: text for key, kind, text in values if kind == "true"}
    return [Call(call.name, call.arguments | strings)]


MINIMAX_M2 = Format(
    ("<invoke name=",),
    until("</invoke>"),
    _read_invoke,
    ignored=("<minimax:tool_call>", "</minimax:tool_call>"),
)
DEEPSEEK_V32 = Format(
    ("<｜DSML｜invoke name=",),
    until("</｜DSML｜invoke>"),
    _read_invoke,
    ignored=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
)
