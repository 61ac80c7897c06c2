"""The bodies of requests and replies, field by field, as OpenAI's API and vLLM's extras have them.

In requests every field may be null, which means the same as leaving it out.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

import paged
from paged.runtime.structured_outputs import StructuredOutputsParams

SYSTEM_FINGERPRINT = f"paged-{paged.__version__}"


class StreamOptions(Struct, frozen=True):
    """When a stream tells how many tokens were used: at its end, or with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def continuous(self) -> bool:
        return bool(self.continuous_usage_stats)


class JsonSchema(Struct, frozen=True):
    """A schema for the answer; `name` and `description` are for the caller, `strict` is implied."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """What form the answer must have: `type` is text, json_object, json_schema or structural_tag.

    A `schema` beside json_object is another way to write json_schema. A structural_tag has a
    `format`, or in its older form `structures` and `triggers`.
    """

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What chat and completions requests share; see `SamplingParams` for most of it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(Struct, frozen=True):
    """A piece of a message; only those of type "text" are understood."""

    type: str
    text: str | None = None


class FunctionCall(Struct, frozen=True):
    """A call that the model made: `arguments` is JSON in a string, or in requests its object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, frozen=True):
    """A tool call, in the history of a conversation or in an answer."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(Struct, frozen=True, kw_only=True):
    """One message of a conversation; `content` may be null beside tool calls only."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None


class PromptTokensDetails(Struct, frozen=True):
    """How many prompt tokens were found in the prefix cache."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct, frozen=True):
    """One candidate at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Candidates by token id, per prompt token; null for the first."""


class CompletionLogprobs(Struct, frozen=True):
    """Four lists with an entry per token; null log-probabilities for a prompt's first token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, frozen=True, kw_only=True, gc=False):
    """One sequence of a completion, whole or one chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Reply(Struct, frozen=True, kw_only=True):
    """The head of every reply and every chunk of one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str = SYSTEM_FINGERPRINT
    usage: Usage | UnsetType = UNSET


class Completion(Reply, frozen=True, kw_only=True):
    """The reply to a completions request, and each chunk of its stream."""

    choices: list[CompletionChoice]
    object: str = "text_completion"


class TopLogprob(Struct, frozen=True):
    """A candidate: `bytes` is the token in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """The chosen token at one position, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """An entry per token."""

    content: list[TokenLogprob]


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """The model's answer. Its reasoning has two names, of which clients know one or the other."""

    content: str | None
    role: str = "assistant"
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    refusal: None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Reply, frozen=True, kw_only=True):
    """The reply to a chat request."""

    choices: list[ChatChoice]
    object: str = "chat.completion"
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds to a call: first its name, then pieces of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A piece of a message's call number `index`, the first of which says what it is."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct, frozen=True, kw_only=True, gc=False):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True, gc=False):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Reply, frozen=True, kw_only=True):
    """One chunk of a chat stream."""

    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """A name that requests may give as their model."""

    id: str
    root: str
    max_model_len: int
    created: int
    object: str = "model"
    owned_by: str = "paged"
    parent: None = None
    permission: list[str] = field(default_factory=list)


class ModelList(Struct, frozen=True, kw_only=True):
    """All of them, the first being the one that replies carry."""

    object: str = "list"
    data: list[ModelCard]


def now() -> int:
    """Seconds since 1970, as the API's `created` fields want them."""
    return int(time.time())
