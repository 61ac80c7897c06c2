"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.anthropic.answer import Answer
from paged.http.api.anthropic.protocol import (
    MESSAGES_NEUTRAL,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from paged.http.api.anthropic.request import NAMES, as_chat
from paged.http.api.body import json_response, read_body
from paged.http.api.chat import Prepared, prepared
from paged.http.api.disconnect import while_connected
from paged.http.api.errors import anthropic_error
from paged.http.api.renamed import renamed
from paged.http.api.service import Service, models_of, new_id
from paged.http.api.streaming import event_stream, named_event, named_events


async def create_message(request: Request) -> Response:
    """Answer a conversation in Anthropic's shape, whole or as a stream."""
    models = models_of(request)
    body = await read_body(request, MessagesRequest, MESSAGES_NEUTRAL, models.max_body_size)
    service = models.for_text(body.model)
    service.check_room(1)
    with renamed(NAMES):
        message_id = new_id(request, "msg", body.request_id, joint="_")
        answer = _answer(service, await prepared(service, as_chat(body), message_id))
        if body.stream:
            return await event_stream(request, named_events(answer.events()), _last_words)
        return json_response(await while_connected(request.receive, answer.finish()))


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a conversation has."""
    models = models_of(request)
    body = await read_body(request, CountTokensRequest, MESSAGES_NEUTRAL, models.max_body_size)
    service = models.for_text(body.model)
    with renamed(NAMES):
        chat = await prepared(service, as_chat(body), "count")
    [prompt] = chat.job.prompts
    return json_response(TokenCount(len(prompt)))


def _answer(service: Service, chat: Prepared) -> Answer:
    """The answer, which ends where the model's length does, be `max_tokens` as it may."""
    params, [prompt] = chat.job.params, chat.job.prompts
    room = service.engine.max_model_len - len(prompt)
    fills = params.max_tokens is not None and params.max_tokens > room >= 1
    if fills:
        job = replace(chat.job, params=replace(params, max_tokens=room))
        chat = replace(chat, job=job)
    return Answer(service, chat, fills=fills)


def _last_words(error: Exception | None) -> bytes:
    return named_event("error", anthropic_error(error)) if error else b""
