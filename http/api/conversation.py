"""A conversation as its model reads it: messages through the chat template."""

from __future__ import annotations

from typing import Any

import msgspec

from paged.http.api.arguments import read_arguments
from paged.http.api.json_size import TooManyValues
from paged.http.api.prompts import encode
from paged.http.api.protocol import ChatRequest, ContentPart, Message, ToolCall
from paged.http.engine import ChatMessage, Engine
from paged.models.chat_template import ChatTemplateError
from paged.runtime.errors import InvalidRequest, Unsupported
from paged.runtime.long_text import without_hurry

# Most templates know no developer; to them it is the system that speaks.
_ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_MEDIA = frozenset(
    {"audio_url", "file", "image", "image_embeds", "image_url", "input_audio", "input_image"}
    | {"video", "video_url"}
)
# What the server itself tells the template, under any name that means something on the way to it.
_RESERVED = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation"}
    | {"conversations", "documents", "messages", "return_assistant_tokens_mask", "self"}
    | {"template", "tokenize", "tools"}
)


async def chat_prompt(body: ChatRequest, engine: Engine, chat_template: str | None) -> list[int]:
    """The conversation's token ids.

    Args:
        body: the request.
        engine: whose tokenizer and length count.
        chat_template: in place of the tokenizer's own.

    Raises:
        InvalidRequest: a message, an option, or the template's own objection.
    """
    _check_options(body)
    _check_number(len(body.messages), engine.max_model_len)
    tokenizer, max_model_len = engine.tokenizer, engine.max_model_len
    if tokenizer is None:
        raise InvalidRequest("This server has no tokenizer, which chat needs", "messages")

    def work() -> list[int]:
        messages = [_as_template_reads(message, at) for at, message in enumerate(body.messages)]
        options = _template_options(body)
        text = tokenizer.apply_chat_template(messages, chat_template=chat_template, **options)
        # The template writes the special tokens itself.
        special = bool(body.add_special_tokens)
        return encode(tokenizer, text, max_model_len, add_special_tokens=special)

    try:
        return await without_hurry(_size(body), work)
    except ChatTemplateError as error:
        raise InvalidRequest(str(error), "messages") from error


def echoed(body: ChatRequest) -> str:
    """What an answer begins with under `echo`: the last message, if the assistant said it."""
    last = body.messages[-1]
    return _text(last, "messages[-1]") if body.echo and last.role == "assistant" else ""


def _size(body: ChatRequest) -> int:
    """Characters that the template may read, be they text or not."""
    read = (body.messages, body.tools, body.documents, body.chat_template_kwargs)
    return len(msgspec.json.encode(read))


def _template_options(body: ChatRequest) -> dict[str, Any]:
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    # Other templates than gpt-oss's ask for no effort, and take no notice.
    effort = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    return (
        effort
        | (body.chat_template_kwargs or {})
        | {
            "add_generation_prompt": not continues if opens is None else opens,
            "continue_final_message": continues,
            "tools": body.tools,
        }
        | ({"documents": body.documents} if body.documents else {})
    )


def _check_options(body: ChatRequest) -> None:
    if not body.messages:
        raise InvalidRequest("messages must not be empty", "messages")
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    reserved = sorted(_RESERVED & (body.chat_template_kwargs or {}).keys())
    if reserved:
        message = f"chat_template_kwargs must not hold {', '.join(reserved)}"
        raise InvalidRequest(message, "chat_template_kwargs")


def _check_number(num_messages: int, max_model_len: int) -> None:
    """Every message takes a token at least: more need not be rendered to be too many."""
    if num_messages > max_model_len:
        raise InvalidRequest(
            f"This model's maximum context length is {max_model_len} tokens, too few for "
            f"{num_messages} messages",
            "input_tokens",
        )


def _as_template_reads(message: Message, at: int) -> ChatMessage:
    where = f"messages[{at}]"
    if message.role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
    if message.content is None and not message.tool_calls:
        allowed = "a string or a list of text parts; null only beside tool_calls"
        raise InvalidRequest(f"{where}.content must be {allowed}", f"{where}.content")
    read: ChatMessage = {"role": _ROLES[message.role], "content": _text(message, where)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            read[name] = value
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        read["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in calls]
    return read | _reasoning(message)


def _reasoning(message: Message) -> ChatMessage:
    """What the assistant thought, by each of the names that templates know."""
    thoughts = message.reasoning or message.reasoning_content
    if thoughts is None:
        return {}
    read: ChatMessage = {"reasoning": thoughts, "reasoning_content": thoughts}
    # gpt-oss's template, alone with this name, refuses both thoughts and words beside a call.
    return read if message.content and message.tool_calls else read | {"thinking": thoughts}


def _text(message: Message, where: str) -> str:
    if isinstance(message.content, list):
        parts = enumerate(message.content)
        return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in parts)
    return message.content or ""


def _part(part: ContentPart, where: str) -> str:
    if part.type in _MEDIA:
        raise Unsupported(f"{where}: only text is supported, got {part.type}", f"{where}.type")
    if part.type != "text":
        raise InvalidRequest(f'{where}.type must be "text"', f"{where}.type")
    if part.text is None:
        raise InvalidRequest(f"{where}.text is required", f"{where}.text")
    return part.text


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates read the arguments as an object, not as the string that the API has."""
    where = f"{where}.function.arguments"
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        arguments = sent_arguments(arguments, where)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def sent_arguments(text: str, where: str) -> dict[str, Any]:
    """The arguments of a call in a request. Raises InvalidRequest, which names `where`."""
    try:
        return read_arguments(text)
    except TooManyValues as error:
        raise InvalidRequest(f"{where} is too much: {error}", where) from None
    except ValueError:
        raise InvalidRequest(f"{where} must be a JSON object in a string", where) from None
