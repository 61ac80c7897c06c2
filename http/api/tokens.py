"""POST /tokenize and /detokenize: text to the token ids that generation reads, and back."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.body import json_response, read_body
from paged.http.api.conversation import chat_prompt
from paged.http.api.fields import Neutral
from paged.http.api.prompts import tokenised
from paged.http.api.protocol import ChatRequest, Message
from paged.http.api.service import AnyService, Service, models_of
from paged.http.engine import Tokenizer
from paged.runtime.errors import InvalidRequest, Unsupported
from paged.runtime.long_text import without_hurry

_NEUTRAL: Neutral = {"mm_processor_kwargs": ({},)}
# What a chat request calls the same.
_OF_CHAT = (
    *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs"),
    *("continue_final_message", "tools"),
)


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """A text, or the messages of a conversation with what chat requests say beside them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class Tokenized(Struct, frozen=True, kw_only=True):
    """Token ids, and their texts where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class Detokenized(Struct, frozen=True, kw_only=True):
    """Their text, special tokens included."""

    prompt: str


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """Texts of special tokens, and the chat template; null for what the model has not."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    sep_token: str | None = None
    cls_token: str | None = None
    chat_template: str | None = None


async def tokenize(request: Request) -> Response:
    """The token ids of a text or a conversation."""
    models = models_of(request)
    body = await read_body(request, TokenizeRequest, _NEUTRAL, models.max_body_size)
    service = models.named(body.model)
    tokens = await _tokens(service, body)
    strings: list[str] | UnsetType = UNSET
    if body.return_token_strs:
        tokenizer = _tokenizer(service)
        strings = await without_hurry(
            len(tokens), lambda: [_text(tokenizer, token) for token in tokens]
        )
    return json_response(
        Tokenized(
            count=len(tokens),
            max_model_len=service.engine.max_model_len,
            tokens=tokens,
            token_strs=strings,
        )
    )


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    models = models_of(request)
    body = await read_body(request, DetokenizeRequest, {}, models.max_body_size)
    service = models.named(body.model)
    tokenizer = _tokenizer(service)

    def work() -> str:
        for token in set(body.tokens):
            if not 0 <= token < 2**31 or not tokenizer.token_bytes(token):
                raise InvalidRequest(f"Token id {token} is out of vocabulary", "tokens")
        return tokenizer.decode(body.tokens, skip_special_tokens=False)

    return json_response(Detokenized(prompt=await without_hurry(len(body.tokens), work)))


async def _tokens(service: AnyService, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")
    if body.messages is not None:
        return await _chat_tokens(service, body, body.messages)
    [tokens] = await tokenised(
        [body.prompt or ""],
        _tokenizer(service),
        service.engine.max_model_len,
        add_special_tokens=body.add_special_tokens is not False,
    )
    return tokens


async def _chat_tokens(
    service: AnyService, body: TokenizeRequest, messages: list[Message]
) -> list[int]:
    if not isinstance(service, Service):
        raise Unsupported("This model has no conversations: send a prompt", "messages")
    # Without tool_choice, tools would be asked to be called; here they are only to be shown.
    chat = ChatRequest(
        messages=messages,
        tool_choice="none" if body.tools else None,
        **{name: getattr(body, name) for name in _OF_CHAT},
    )
    template = service.template_for(body.chat_template)
    return await chat_prompt(service.defaults.fill(chat), service.engine, template)


async def tokenizer_info(request: Request) -> Response:
    """What clients must know to put prompts together themselves."""
    service = models_of(request).named(request.query_params.get("model"))
    tokenizer = _tokenizer(service)
    served = service.chat_template if isinstance(service, Service) else None
    names = TokenizerInfo.__struct_fields__
    special = {name: text for name, text in tokenizer.special_tokens.items() if name in names}
    template = served or tokenizer.chat_templates.get("default")
    return json_response(TokenizerInfo(**special, chat_template=template))


def _tokenizer(service: AnyService) -> Tokenizer:
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        raise InvalidRequest("This server has no tokenizer", "prompt")
    return tokenizer


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")
