"""The bodies of /v1/messages, field by field. In requests null means the same as leaving it out."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from paged.http.api.fields import Neutral

MESSAGES_NEUTRAL: Neutral = {
    "container": (),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}


class InputBlock(Struct, frozen=True, kw_only=True):
    """A piece of a message or of a tool's result; `type` says which of the fields count."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | None = None
    is_error: bool | None = None


class InputMessage(Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | list[InputBlock]


class Tool(Struct, frozen=True, kw_only=True):
    """A function that the model may call; those that a server would run are others' `type`s."""

    name: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class ToolChoice(Struct, frozen=True, kw_only=True):
    """Which tools are to be called: `type` is auto, any, tool (by its `name`) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Struct, frozen=True, kw_only=True):
    """How the model thinks: `type` is enabled, adaptive or disabled; `display` may be omitted."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Struct, frozen=True):
    """A schema for the answer; `type` is json_schema."""

    type: str
    schema: dict[str, Any] | None = None


class OutputOptions(Struct, frozen=True, kw_only=True):
    """The answer's form, and the effort that the template is told."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: what the prompt is made from."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[InputBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages; what is not Anthropic's is as in a chat request."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class TokenCount(Struct, frozen=True):
    """Tokens of a prompt."""

    input_tokens: int


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    """Text for the user."""

    text: str
    citations: None = None


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    """What the model wrote for itself; nothing is signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call; its input is empty if the answer was cut within it."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(Struct, frozen=True):
    """Tokens that a message took: those found in the prefix cache are not in `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageReply(Struct, frozen=True, kw_only=True):
    """An answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block] = field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More thoughts."""

    thinking: str


class InputJsonDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as JSON that is whole with the last piece."""

    partial_json: str


class MessageEvent(Struct, frozen=True, kw_only=True):
    """One event of a stream; `type` says which of the other fields there are."""

    type: str
    message: MessageReply | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: TextDelta | ThinkingDelta | InputJsonDelta | UnsetType = UNSET


class Stop(Struct, frozen=True):
    """Why an answer ended, and the stop sequence that did it."""

    stop_reason: str
    stop_sequence: str | None


class StopEvent(Struct, frozen=True, kw_only=True):
    """The event of a stream that tells of its end, before the last."""

    type: str = "message_delta"
    delta: Stop
    usage: MessagesUsage
