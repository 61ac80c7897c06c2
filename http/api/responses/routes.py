"""POST /v1/responses, and what can be done with a response by its id."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial

from msgspec import structs
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from paged.http.api.body import json_response, read_body
from paged.http.api.chat import prepared
from paged.http.api.disconnect import while_connected
from paged.http.api.errors import EXPECTED
from paged.http.api.renamed import renamed
from paged.http.api.responses.answer import Answer
from paged.http.api.responses.conversation import items_of
from paged.http.api.responses.protocol import (
    RESPONSES_NEUTRAL,
    DeletedResponse,
    InputItem,
    Response,
    ResponsesRequest,
)
from paged.http.api.responses.request import NAMES, as_chat
from paged.http.api.responses.store import ResponseStore, Stored
from paged.http.api.responses.truncation import fitting
from paged.http.api.service import Models, models_of, new_id
from paged.http.api.streaming import event_stream, named_event, named_events
from paged.runtime.errors import InvalidRequest, Unsupported

logger = logging.getLogger(__name__)

_CONTINUABLE = ("completed", "incomplete")


async def create_response(request: Request) -> HttpResponse:
    """Answer a conversation of typed items, whole, as a stream or in the background."""
    models = models_of(request)
    body = await read_body(request, ResponsesRequest, RESPONSES_NEUTRAL, models.max_body_size)
    with renamed(NAMES):
        answer = await _asked(models, body, new_id(request, "resp", body.request_id, joint="_"))
        if body.background:
            return json_response(_in_background(answer, models.kept_responses("background")))
        if body.stream:
            events = named_events(answer.events())
            return await event_stream(request, events, partial(_last_words, answer))
        return json_response(await while_connected(request.receive, answer.finish()))


class StoredResponse(HTTPEndpoint):
    """What can be done with a response that is there; one route, so that `Allow` names both."""

    async def get(self, request: Request) -> HttpResponse:
        """A stored response as it is now."""
        if request.query_params.get("stream") == "true":
            message = "stream is not supported for a response that is there already"
            raise Unsupported(message, "stream")
        stored = models_of(request).kept_responses().get(request.path_params["response_id"])
        return json_response(stored.response)

    async def delete(self, request: Request) -> HttpResponse:
        """Forget a stored response."""
        response_id = request.path_params["response_id"]
        models_of(request).kept_responses().delete(response_id)
        return json_response(DeletedResponse(response_id))


async def cancel_response(request: Request) -> HttpResponse:
    """End a response that is made in the background; one that has ended stays as it is."""
    responses = models_of(request).kept_responses()
    stored = responses.get(request.path_params["response_id"])
    if not stored.response.background:
        raise InvalidRequest("Only a response with background true can be cancelled", "background")
    if stored.response.status == "in_progress":
        responses.delete(stored.response.id)
        cancelled = structs.replace(stored.response, status="cancelled")
        stored = replace(stored, response=cancelled, task=None)
        responses.put(stored)
    return json_response(stored.response)


async def _asked(models: Models, body: ResponsesRequest, response_id: str) -> Answer:
    """The answer that a request will get. Raises for anything that cannot be carried out."""
    service = models.for_text(body.model)
    service.check_room(1)
    earlier = _earlier(models, body.previous_response_id)
    items = earlier + items_of(body.input)
    chat = as_chat(body, items, num_earlier=len(earlier))
    if body.truncation == "auto":
        chat = await fitting(service, chat)
    chosen = await prepared(service, chat, response_id)
    store = models.responses if body.stored else None
    return Answer(service, store, body, chosen, items)


def _earlier(models: Models, response_id: str | None) -> tuple[InputItem, ...]:
    """The conversation up to and with a stored response."""
    if response_id is None:
        return ()
    name = "previous_response_id"
    stored = models.kept_responses(name).get(response_id, name)
    if stored.response.status not in _CONTINUABLE:
        message = f"{name} names a response that is {stored.response.status}: it has no answer"
        raise InvalidRequest(message, name)
    return stored.items


def _last_words(answer: Answer, error: Exception | None) -> bytes:
    if error is None:
        return b""
    event = answer.fail(error)
    return named_event(event.type, event)


def _in_background(answer: Answer, responses: ResponseStore) -> Response:
    """Start an answer; the store holds what makes it. Raises InvalidRequest if it cannot."""
    task = asyncio.create_task(_finish(answer))
    responses.put(Stored(answer.response, answer.items, task))
    if answer.response.id not in responses:
        raise InvalidRequest(
            "This conversation is too large to be kept: drop background", "background"
        )
    return answer.response


async def _finish(answer: Answer) -> None:
    try:
        await answer.finish()
    except Exception as error:
        known = isinstance(error, (*EXPECTED, InvalidRequest))
        logger.error("%s failed: %s", answer.response.id, error, exc_info=not known)
        answer.fail(error)
