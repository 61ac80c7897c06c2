"""A request for a message as the chat request that gives the same answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paged.http.api.anthropic.protocol import (
    CountTokensRequest,
    InputBlock,
    InputMessage,
    MessagesRequest,
    OutputFormat,
    OutputOptions,
    ThinkingOptions,
    Tool,
    ToolChoice,
)
from paged.http.api.fields import missing, require
from paged.http.api.protocol import (
    ChatRequest,
    FunctionCall,
    JsonSchema,
    Message,
    ResponseFormat,
    ToolCall,
)
from paged.runtime.errors import InvalidRequest, Unsupported

NAMES = {
    "prompt": "messages",
    "response_format": "output_config",
    "stop": "stop_sequences",
    "structured_outputs": "output_config",
}
"""Fields of a chat request, and what they are called here."""

_SAME = (
    *("max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "seed", "priority", "cache_salt", "request_id"),
    "timeout",
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# What templates call the switch, each in its own way; others take no notice.
_SWITCHES = ("enable_thinking", "thinking")


def as_chat(body: CountTokensRequest) -> ChatRequest:
    """The chat request. Raises InvalidRequest for anything that cannot be carried out."""
    if not body.messages:
        raise InvalidRequest("messages must not be empty", "messages")
    messages = [*_system(body), *_messages(body.messages)]
    output, thinking = body.output_config or OutputOptions(), body.thinking
    choice, last = body.tool_choice, messages[-1]
    if last.tool_calls:
        message = "messages must not end with a tool_use, but with its tool_result"
        raise InvalidRequest(message, "messages")
    return ChatRequest(
        messages=messages,
        model=body.model,
        continue_final_message=last.role == "assistant",
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(choice) if choice else None,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        include_reasoning=_shows_thinking(thinking) if thinking else True,
        chat_template_kwargs=_switched(thinking) | (body.chat_template_kwargs or {}),
        reasoning_effort=output.effort,
        response_format=_response_format(output.format) if output.format else None,
        **(_of_answer(body) if isinstance(body, MessagesRequest) else {}),
    )


def _of_answer(body: MessagesRequest) -> dict[str, Any]:
    return {name: getattr(body, name) for name in _SAME} | {"stop": body.stop_sequences}


def _system(body: CountTokensRequest) -> list[Message]:
    return [Message(role="system", content=_text(body.system, "system"))] if body.system else []


def _messages(given: Sequence[InputMessage]) -> Iterator[Message]:
    for at, message in enumerate(given):
        where = f"messages[{at}]"
        match message.role:
            case "user":
                yield from _of_user(message.content, f"{where}.content")
            case "assistant":
                yield _of_assistant(message.content, f"{where}.content")
            case "system":
                yield Message(role="system", content=_text(message.content, f"{where}.content"))
            case _:
                where, allowed = f"{where}.role", "user, assistant or system"
                found = message.role[:100]
                raise InvalidRequest(f"{where} must be {allowed}, got {found!r}", where)


def _of_user(content: str | list[InputBlock], where: str) -> Iterator[Message]:
    """Results of tools are messages of their own; so are the texts between them."""
    if isinstance(content, str):
        yield Message(role="user", content=content)
        return
    texts: list[str] = []
    for at, block in enumerate(content):
        if block.type != "tool_result":
            texts.append(_part(block, f"{where}[{at}]"))
            continue
        if texts:
            yield Message(role="user", content="\n".join(texts))
            texts = []
        yield _result(block, f"{where}[{at}]")
    if texts or not content:
        yield Message(role="user", content="\n".join(texts))


def _result(block: InputBlock, where: str) -> Message:
    """Templates know no failed results: that one failed is said in words."""
    require(block, where, "tool_use_id")
    text = _text(block.content or "", f"{where}.content")
    content = f"Error: {text}" if block.is_error else text
    return Message(role="tool", content=content, tool_call_id=block.tool_use_id)


def _of_assistant(content: str | list[InputBlock], where: str) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    texts, thoughts, calls = "", "", list[ToolCall]()
    for at, block in enumerate(content):
        match block.type:
            case "thinking":
                require(block, f"{where}[{at}]", "thinking")
                thoughts += block.thinking or ""
            case "tool_use":
                require(block, f"{where}[{at}]", "id", "name", "input")
                calls.append(ToolCall(FunctionCall(block.name or "", block.input), block.id))
            case _:
                texts += _part(block, f"{where}[{at}]")
    return Message(
        role="assistant", content=texts, reasoning=thoughts or None, tool_calls=calls or None
    )


def _text(content: str | list[InputBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(block, f"{where}[{i}]") for i, block in enumerate(content))


def _part(block: InputBlock, where: str) -> str:
    if block.type != "text":
        found = f"only text is supported here, got {block.type[:100]!r}"
        raise Unsupported(f"{where}.type: {found}", f"{where}.type")
    require(block, where, "text")
    return block.text or ""


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = f'{where}.type must be "custom": this server runs no tools itself, got'
        raise Unsupported(f"{message} {tool.type[:100]!r}", f"{where}.type")
    if not tool.name:
        raise InvalidRequest(f"{where}.name must be a text that is not empty", f"{where}.name")
    if tool.input_schema is None:
        raise missing(f"{where}.input_schema")
    description = {"description": tool.description} if tool.description else {}
    function = {"name": tool.name, **description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type in _CHOICES:
        return _CHOICES[choice.type]
    if choice.type != "tool":
        allowed = "auto, any, tool or none"
        raise InvalidRequest(
            f"tool_choice.type must be {allowed}, got {choice.type[:100]!r}", "tool_choice.type"
        )
    if not choice.name:
        raise missing("tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _shows_thinking(thinking: ThinkingOptions) -> bool:
    """Whether the reply holds the thoughts. Budgets are goals, and are not enforced."""
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        allowed = "enabled, adaptive or disabled"
        raise Unsupported(
            f"thinking.type must be {allowed}, got {thinking.type[:100]!r}", "thinking.type"
        )
    if thinking.display not in (None, "summarized", "omitted"):
        allowed = "summarized or omitted"
        raise InvalidRequest(
            f"thinking.display must be {allowed}, got {thinking.display[:100]!r}",
            "thinking.display",
        )
    return thinking.type != "disabled" and thinking.display != "omitted"


def _switched(thinking: ThinkingOptions | None) -> dict[str, bool]:
    """What the template is told; where nothing is said, or adaptive, it decides itself."""
    if thinking is None or thinking.type == "adaptive":
        return {}
    return dict.fromkeys(_SWITCHES, thinking.type == "enabled")


def _response_format(format: OutputFormat) -> ResponseFormat:
    if format.type != "json_schema":
        where = "output_config.format.type"
        raise InvalidRequest(f'{where} must be "json_schema", got {format.type[:100]!r}', where)
    if format.schema is None:
        raise missing("output_config.format.schema")
    return ResponseFormat("json_schema", JsonSchema(schema=format.schema))
