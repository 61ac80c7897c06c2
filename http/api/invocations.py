"""POST /invocations: one path for every route, as SageMaker calls a model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from paged.http.api.body import fields_of, read_json
from paged.http.api.service import models_of
from paged.runtime.errors import InvalidRequest

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

# A field that no other of these routes' requests must have.
_PATHS = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "query": "/rerank",
    "queries": "/score",
    "text_1": "/score",
    "data_1": "/score",
}


def invocations(routes: Mapping[str, Handler]) -> Handler:
    """The handler that passes requests on to that of `routes` whose fields they have."""

    async def invoke(request: Request) -> Response:
        """What one of the other routes answers, told by the body's fields."""
        body = await read_json(request, models_of(request).max_body_size)
        fields = fields_of(body)
        path = next((_PATHS[name] for name in _PATHS if name in fields), None)
        if path is None:
            raise InvalidRequest(f"The body must have one of the fields {', '.join(_PATHS)}")
        return await routes[path](Request(request.scope, _again(body, request.receive)))

    return invoke


def _again(body: bytes, receive: Receive) -> Receive:
    """What gives a body that has been read, and then whatever comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
