"""A request for a response as the chat request that gives the same answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from paged.http.api.fields import missing
from paged.http.api.protocol import ChatRequest, JsonSchema, Message, ResponseFormat
from paged.http.api.responses.conversation import messages_of
from paged.http.api.responses.protocol import (
    InputItem,
    ReasoningOptions,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from paged.runtime.errors import InvalidRequest, Unsupported

LOGPROBS = "message.output_text.logprobs"
# Reasoning is never encrypted: it is in the reply for all to read and to send back.
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")

NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}
"""Fields of a chat request, and what they are called here."""

_SAME = (
    *("model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls"),
    *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "stop", "min_tokens", "ignore_eos", "chat_template_kwargs"),
    *("priority", "cache_salt", "request_id", "timeout"),
)


def as_chat(body: ResponsesRequest, items: Sequence[InputItem], *, num_earlier: int) -> ChatRequest:
    """The chat request.

    Args:
        body: the request.
        items: the whole conversation, of which `num_earlier` came with earlier requests.

    Raises:
        InvalidRequest: anything that cannot be carried out.
    """
    _check_options(body)
    reasoning = body.reasoning or ReasoningOptions()
    return ChatRequest(
        messages=_instructed(body.instructions, messages_of(items, num_earlier=num_earlier)),
        max_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or ()),
        response_format=_response_format((body.text or TextOptions()).format),
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        reasoning_effort=reasoning.effort,
        **{name: getattr(body, name) for name in _SAME},
    )


def _instructed(instructions: str | None, messages: list[Message]) -> list[Message]:
    """Messages with instructions in front, in one message with those that the system begins with:
    few templates take a second one."""
    if not instructions:
        return messages
    leading = [*takewhile(lambda message: message.role in ("system", "developer"), messages)]
    texts = [instructions, *(str(message.content) for message in leading)]
    return [Message(role="system", content="\n\n".join(texts)), *messages[len(leading) :]]


def _check_options(body: ResponsesRequest) -> None:
    for name in body.include or ():
        if name not in _INCLUDABLE:
            allowed = " or ".join(_INCLUDABLE)
            raise Unsupported(f"include may hold {allowed}, got {name[:100]!r}", "include")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise InvalidRequest(f"top_logprobs need include to hold {LOGPROBS}", "top_logprobs")
    if body.background and not body.stored:
        raise InvalidRequest("background needs store, or nobody could read it", "background")
    if body.background and body.stream:
        raise Unsupported("background and stream exclude each other here", "background")
    reasoning, text = body.reasoning or ReasoningOptions(), body.text or TextOptions()
    options = body.stream_options
    _check_neutral("reasoning.summary", reasoning.summary, "auto")
    _check_neutral("reasoning.generate_summary", reasoning.generate_summary, "auto")
    _check_neutral("reasoning.context", reasoning.context, "auto")
    _check_neutral("reasoning.mode", reasoning.mode, "standard")
    _check_neutral("text.verbosity", text.verbosity, "medium")
    if options is not None and options.include_obfuscation:
        _check_neutral("stream_options.include_obfuscation", "true", "false")


def _check_neutral(name: str, value: str | None, neutral: str) -> None:
    if value not in (None, neutral):
        raise Unsupported(f"{name} is not supported, but for {neutral!r}", name)


def _response_format(format: TextFormat | None) -> ResponseFormat | None:
    if format is None:
        return None
    if format.type not in ("text", "json_object", "json_schema"):
        message = "text.format.type must be text, json_object or json_schema"
        raise InvalidRequest(f"{message}, got {format.type[:100]!r}", "text.format.type")
    if format.type != "json_schema":
        return ResponseFormat(format.type)
    if format.schema is None:
        raise missing("text.format.schema")
    return ResponseFormat("json_schema", JsonSchema(format.name, schema=format.schema))


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The function of a flat tool, in the shape that templates read."""
    if tool.get("type") != "function":
        found = str(tool.get("type"))[:100]
        message = (
            f'{where}.type must be "function": this server runs no tools itself, got {found!r}'
        )
        raise Unsupported(message, f"{where}.type")
    name, parameters = tool.get("name"), tool.get("parameters")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.name must be a text that is not empty", f"{where}.name")
    if not isinstance(parameters, dict | None):
        path = f"{where}.parameters"
        raise InvalidRequest(f"{path} must be a JSON schema, an object", path)
    told = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in told if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function":
        found = str(choice.get("type"))[:100]
        message = f'tool_choice.type must be "function", got {found!r}'
        raise Unsupported(message, "tool_choice.type")
    if not isinstance(choice.get("name"), str):
        raise InvalidRequest("tool_choice.name must be a text", "tool_choice.name")
    return {"type": "function", "function": {"name": choice["name"]}}
