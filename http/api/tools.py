"""The tools of a chat request: which functions there are, and which may or must be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from paged.http.api.parsers.events import Tools
from paged.http.api.parsers.forced import Schema, named_schema, required_schema
from paged.http.api.protocol import ChatRequest
from paged.runtime.errors import InvalidRequest
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.structured_outputs import StructuredOutputsParams

_NAMES = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolUse:
    """What a request wants of its tools.

    Attributes:
        choice: "none", "auto", "required" or "named".
        tools: functions that may be called; none at all under "none".
        parallel: whether one answer may call several times.
    """

    choice: str = "none"
    tools: Tools = field(default_factory=dict)
    parallel: bool = True

    @property
    def name(self) -> str:
        """The function that is to be called, where the choice is "named"."""
        [name] = self.tools
        return name

    @property
    def schema(self) -> Schema | None:
        """What the answer must be; None where the model is free."""
        if self.choice == "named":
            return named_schema(self.tools[self.name])
        if self.choice == "required":
            return required_schema(self.tools, parallel=self.parallel)
        return None


def read_tools(body: ChatRequest, *, automatic: bool) -> ToolUse:
    """Check a request's tools and its choice.

    Args:
        body: the request.
        automatic: whether this server reads the calls that a model makes of its own accord.

    Raises:
        InvalidRequest: a tool or choice of another form, or that this server is not set up for.
    """
    if body.tools == []:
        raise InvalidRequest("tools must not be empty; leave the field out", "tools")
    functions = dict(_function(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()))
    choice, tools = _choice(body, functions)
    if choice == "auto" and not automatic:
        raise InvalidRequest(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be '
            'set when the server is started; without them tool_choice must be "none", "required" '
            "or a function",
            "tool_choice",
        )
    return ToolUse(choice, tools, body.parallel_tool_calls is not False)


def forced(params: SamplingParams, use: ToolUse) -> SamplingParams:
    """Parameters under which the answer is the call that a request forces, if it does.

    Raises:
        InvalidRequest: the request wants another form of the answer as well.
    """
    if use.schema is None:
        return params
    if params.structured_outputs is not None:
        message = "tool_choice forces a call, and structured output something else: drop one"
        raise InvalidRequest(message, "tool_choice")
    return replace(params, structured_outputs=StructuredOutputsParams(json=use.schema))


def without_tools(body: ChatRequest) -> ChatRequest:
    """The same request as a model sees it that is not told of its tools."""
    return structs.replace(body, tools=None)


def _choice(body: ChatRequest, functions: Tools) -> tuple[str, Tools]:
    """The kind of choice, and the functions that it leaves."""
    choice = body.tool_choice
    if isinstance(choice, Mapping):
        name = _named(choice)
        if name not in functions:
            message = f"tool_choice names {name!r}, which is none of the tools"
            raise InvalidRequest(message, "tool_choice")
        return "named", {name: functions[name]}
    if choice not in (None, *_NAMES):
        allowed = ", ".join(f'"{name}"' for name in _NAMES)
        raise InvalidRequest(f"tool_choice must be {allowed} or a function", "tool_choice")
    if not functions and choice == "required":
        raise InvalidRequest("tool_choice needs tools to choose from", "tool_choice")
    if not functions or choice == "none":
        return "none", {}
    return choice or "auto", functions


def _named(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        allowed = '{"type": "function", "function": {"name": ...}}'
        raise InvalidRequest(f"tool_choice must name a function as {allowed}", "tool_choice")
    return name


def _function(tool: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """The name of a tool's function, and the schema of its parameters."""
    if tool.get("type") != "function":
        raise InvalidRequest(f'{where}.type must be "function"', f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object", f"{where}.function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        message = f"{where}.function.name must be a text that is not empty"
        raise InvalidRequest(message, f"{where}.function.name")
    if not isinstance(parameters, dict | None):
        path = f"{where}.function.parameters"
        raise InvalidRequest(f"{path} must be a JSON schema, an object", path)
    return name, parameters or {}
