"""Requests on their way to replicas, and replies on their way back. Knows nothing of Ray."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from paged.http.api.body import read_whole
from paged.http.api.errors import (
    GenerationFailed,
    anthropic_error,
    handle_error,
    is_anthropic,
    unavailable,
)
from paged.http.api.streaming import done, named_event
from paged.http.paths import path_of
from paged.http.replicas.joined import JOINED, Whole
from paged.http.replicas.reply_pipes import ReplicaLost
from paged.http.replicas.request import Asked, asked
from paged.http.request_ids import EchoRequestId

logger = logging.getLogger(__name__)

Messages = AsyncGenerator[Sequence[Message], None]
"""The parts of a reply as ASGI has them, those that are there at the same time in one piece."""

# How many replicas a request may see die: it may be what they die of.
_MOST_TRIES = 3
_SECONDS_TO_RETRY = 5
_LOST = "The replica that worked on this request has stopped; ask again"


class CutOff(RuntimeError):
    """A reply that has begun, is no stream, and has no end: its connection must not look whole."""


class Fleet(Protocol):
    """The replicas of an application."""

    def answer(self, request: Asked) -> Messages:
        """What one of them replies. Raises ReplicaLost, and Overloaded if too many wait already."""

    async def answers(self, request: Asked) -> Sequence[Whole]:
        """What each of them replies; those that are gone are left out."""


class Relay:
    """An ASGI application that has replicas answer.

    A reply is passed on once its body begins. Until then another replica is asked if one dies, for
    which the client knows no difference; after that a stream ends with an error.

    Args:
        max_body_size: bytes of a request.
    """

    def __init__(self, fleet: Fleet, max_body_size: int) -> None:
        self._fleet = fleet
        self._max_body_size = max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            whole = asked(scope, await read_whole(request, self._max_body_size))
            if scope["method"] == "GET" and (join := JOINED.get(path_of(scope))):
                reply = join(await self._fleet.answers(whole))
            elif await self._relayed(whole, send):
                return
            else:
                reply = unavailable(_LOST, path_of(scope), _SECONDS_TO_RETRY)
        except CutOff:
            raise
        except Exception as error:
            reply = await handle_error(request, error)
        await EchoRequestId(reply)(scope, receive, send)

    async def _relayed(self, request: Asked, send: Send) -> bool:
        """Whether a reply was passed on. Raises CutOff, or what no reply can begin for."""
        for _ in range(_MOST_TRIES):
            reply = _Reply(path_of(request.scope), send)
            try:
                async with aclosing(self._fleet.answer(request)) as pieces:
                    async for messages in pieces:
                        await reply.pass_on(messages)
            except ReplicaLost as error:
                logger.warning("%s: %s", request.scope["path"], error)
                if not reply.has_begun:
                    continue
            if not reply.is_whole:
                await reply.break_off()
            return True
        return False


class _Reply:
    """A reply on its way to the client.

    Attributes:
        has_begun: whether the client has got something of it.
        is_whole: whether it has got all.
    """

    def __init__(self, path: str, send: Send) -> None:
        self.has_begun = self.is_whole = False
        self._path, self._send = path, send
        self._head: Message | None = None

    async def pass_on(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                self._head = message
                continue
            if not self.has_begun and self._head is not None:
                self.has_begun = True
                await self._send(self._head)
            self.is_whole = not message.get("more_body", False)
            await self._send(message)

    async def break_off(self) -> None:
        """End a stream with an error, in the words that its client reads; what is none is cut."""
        headers = dict(self._head["headers"]) if self._head else {}
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise CutOff(_LOST)
        error = GenerationFailed(_LOST, _LOST)
        words = done(error)
        if is_anthropic(self._path):
            words = named_event("error", anthropic_error(error))
        await self._send({"type": "http.response.body", "body": words})
