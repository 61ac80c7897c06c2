"""The bodies of /v1/responses, field by field.

In requests every field may be null, which means the same as leaving it out.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from paged.http.api.fields import Neutral
from paged.http.api.protocol import TokenLogprob

RESPONSES_NEUTRAL: Neutral = {
    "access_programs": (),
    "background_options": ({},),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
}


class InputPart(Struct, frozen=True):
    """A piece of a message, of a result or of reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item of a conversation: `type`, by default "message", says which fields count."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class TextFormat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What form the answer must have: `type` is text, json_object or json_schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the answer is written; of `verbosity` only "medium" can be had."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the model reasons: `effort` is for its template, and there are no summaries."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(Struct, frozen=True):
    """Events can not be padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/responses; what is not OpenAI's is as in a chat request."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    @property
    def stored(self) -> bool:
        return self.store is not False


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message, with its tokens' log-probabilities where they were asked for."""

    text: str
    annotations: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """What the model wrote for itself."""

    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """An item of an answer: text for the user, in one part."""

    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """An item of an answer: reasoning, in one part and in full."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[str] = field(default_factory=list)


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """An item of an answer: a call of a function; `arguments` is JSON in a string."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct, frozen=True):
    """Prompt tokens found in the prefix cache; writing to it is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """How many tokens the text of the reasoning has."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """Tokens that a response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    """Why a response failed: `code` is server_error or invalid_prompt."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: str = "max_output_tokens"


class Response(Struct, frozen=True, kw_only=True):
    """An answer with what it was asked for.

    `status` is in_progress, completed, incomplete, failed or cancelled.
    """

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(Struct, frozen=True):
    """What DELETE says."""

    id: str
    object: str = "response"
    deleted: bool = True


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """One event of a stream; `type` says which of the other fields there are."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
