"""Calls written as a Python list: `[clock(zone="UTC"), weather(city="Oslo", days=3)]`."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from paged.http.api.parsers.calls import Call, Format, NoCall
from paged.http.api.parsers.events import Tools
from paged.http.api.parsers.marks import WHITE_SPACE

# JSON's words, which models mix in.
_CONSTANTS = {"true": True, "false": False, "null": None}
_FILE = "<tool call>"
# A text with a stray backslash is no reason to warn the operator.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=_FILE)


def _list(text: str) -> ast.List:
    try:
        found = ast.parse(text.strip(WHITE_SPACE), _FILE, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NoCall(str(error)) from None
    if not isinstance(found, ast.List):
        raise NoCall("no list")
    return found


def _end(text: str, fresh: int) -> int | None:
    """The first bracket that closes a list that Python can read."""
    at = text.find("]", fresh)
    while at >= 0:
        if _may_close(text, at) and _is_list(text[: at + 1]):
            return at + 1
        at = text.find("]", at + 1)
    return None


def _may_close(text: str, at: int) -> bool:
    """Whether it is worth a look: a list of calls ends in one, and those in arguments are many."""
    return text[:at].rstrip(WHITE_SPACE).endswith(")") or "(" not in text[:at]


def _is_list(text: str) -> bool:
    try:
        _list(text)
    except NoCall:
        return False
    return True


def _read(text: str, tools: Tools) -> list[Call]:
    calls = [_call(element) for element in _list(text).elts]
    if not calls:
        raise NoCall("an empty list")
    return calls


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise NoCall("no call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise NoCall("arguments without names")
        arguments[keyword.arg] = _value(keyword.value)
    return Call(ast.unparse(node.func), arguments)


def _value(node: ast.expr) -> Any:
    """A literal, as JSON knows them."""
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise NoCall("an argument that is no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NoCall("a key that is no text")


PYTHONIC = Format(("[",), _end, _read, alone=True)
LLAMA4_PYTHONIC = Format(
    ("[",), _end, _read, ignored=("<|python_start|>", "<|python_end|>"), alone=True
)
