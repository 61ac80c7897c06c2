"""The items of a conversation as messages: what one side says at a time is one message."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from paged.http.api.conversation import sent_arguments
from paged.http.api.fields import missing, require
from paged.http.api.protocol import FunctionCall, Message, ToolCall
from paged.http.api.responses.protocol import (
    FunctionCallItem,
    InputItem,
    InputPart,
    OutputItem,
    OutputMessage,
    ReasoningItem,
)
from paged.runtime.errors import InvalidRequest, Unsupported

_ROLES = ("user", "assistant", "system", "developer")
_TYPES = ("message", "reasoning", "function_call", "function_call_output")
_MEDIA = frozenset({"input_audio", "input_file", "input_image"})
_TEXTS = frozenset({"input_text", "output_text", "reasoning_text", "summary_text", "text"})


def items_of(input: str | list[InputItem]) -> tuple[InputItem, ...]:
    """A request's input as items. Raises InvalidRequest if there are none."""
    if isinstance(input, str):
        return (InputItem(role="user", content=input),)
    if not input:
        raise InvalidRequest("input must not be empty", "input")
    return tuple(input)


def messages_of(items: Sequence[InputItem], *, num_earlier: int = 0) -> list[Message]:
    """The messages that a template reads.

    Reasoning, text and calls of one turn of the assistant are one message.

    Args:
        items: a conversation.
        num_earlier: items at its beginning that came with earlier requests.

    Raises:
        InvalidRequest: an item of another form.
    """
    messages: list[Message] = []
    for at, item in enumerate(items, start=-num_earlier):
        message = _message(item, f"input[{at}]")
        if message is None:
            continue
        if messages and _is_one_turn(messages[-1], message):
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def as_input(item: OutputItem) -> InputItem:
    """An item of an answer as the next request would send it."""
    match item:
        case OutputMessage(content=parts):
            texts = [InputPart("output_text", part.text) for part in parts]
            return InputItem(role="assistant", content=texts)
        case ReasoningItem(content=thoughts):
            texts = [InputPart("reasoning_text", part.text) for part in thoughts]
            return InputItem(type="reasoning", content=texts)
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
            return InputItem(type="function_call", call_id=call_id, name=name, arguments=arguments)


def _is_one_turn(said: Message, more: Message) -> bool:
    if said.role != "assistant" or more.role != "assistant":
        return False
    if more.tool_calls or not (said.content or said.tool_calls):
        return True
    return bool(said.tool_calls and more.content)


def _joined(said: Message, more: Message) -> Message:
    reasoning = (said.reasoning or "") + (more.reasoning or "")
    return structs.replace(
        said,
        content=f"{said.content or ''}{more.content or ''}",
        reasoning=reasoning or None,
        tool_calls=[*(said.tool_calls or ()), *(more.tool_calls or ())] or None,
    )


def _message(item: InputItem, where: str) -> Message | None:
    """None for reasoning that says nothing, as that which only its own server could read."""
    match item.type:
        case "message":
            return _said(item, where)
        case "reasoning":
            thoughts = _text(item.content or item.summary or [], f"{where}.content")
            return Message(role="assistant", content="", reasoning=thoughts) if thoughts else None
        case "function_call":
            return Message(role="assistant", content="", tool_calls=[_call(item, where)])
        case "function_call_output":
            require(item, where, "call_id", "output")
            text = _text(item.output or "", f"{where}.output")
            return Message(role="tool", content=text, tool_call_id=item.call_id)
    raise Unsupported(
        f"{where}.type must be one of {', '.join(_TYPES)}, got {item.type[:100]!r}",
        f"{where}.type",
    )


def _said(item: InputItem, where: str) -> Message:
    if item.role not in _ROLES:
        found = "none" if item.role is None else repr(item.role[:100])
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {found}", f"{where}.role"
        )
    require(item, where, "content")
    return Message(role=item.role, content=_text(item.content or "", f"{where}.content"))


def _call(item: InputItem, where: str) -> ToolCall:
    require(item, where, "call_id", "name", "arguments")
    arguments = sent_arguments(item.arguments or "{}", f"{where}.arguments")
    return ToolCall(FunctionCall(item.name or "", arguments), item.call_id)


def _text(content: str | list[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: InputPart, where: str) -> str:
    if part.type in _MEDIA:
        where = f"{where}.type"
        raise Unsupported(f"{where}: only text is supported, got {part.type}", where)
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXTS | {"refusal"}:
        raise InvalidRequest(
            f"{where}.type must be input_text or output_text, got {part.type[:100]!r}",
            f"{where}.type",
        )
    if text is None:
        raise missing(f"{where}.text")
    return text
