"""Server-sent events: one for every chunk, and last words at the end, come what may."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paged.http.api.disconnect import while_connected
from paged.http.api.errors import EXPECTED, ErrorBody, error_info
from paged.http.request_counter import DIRECT_SEND

logger = logging.getLogger(__name__)

Events = AsyncGenerator[bytes, None]

LastWords = Callable[[Exception | None], bytes]
"""What a stream ends with, given the error that ended it, if one did."""

_DONE = b"data: [DONE]\n\n"
# Proxies must not hold chunks back; nginx asks for this header by name.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


_encode = msgspec.json.Encoder().encode


def event(chunk: msgspec.Struct) -> bytes:
    """One event."""
    return b"data: %b\n\n" % _encode(chunk)


class Typed(Protocol):
    """What says itself what kind of event it is."""

    @property
    def type(self) -> str: ...


def named_event(name: str, chunk: msgspec.Struct | Typed) -> bytes:
    """One event of those that say what they are in a line of their own, too."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(chunk))


async def named_events(pieces: AsyncGenerator[Sequence[Typed], None]) -> Events:
    """Such events, those that are there at the same time in one piece."""
    async with aclosing(pieces):
        async for events in pieces:
            yield b"".join(named_event(event.type, event) for event in events)


def done(error: Exception | None) -> bytes:
    """`data: [DONE]`, after an error if there was one: the last words of OpenAI's older routes."""
    return (event(ErrorBody(error_info(error))) if error else b"") + _DONE


class EventMaker:
    """The events of one stream that differ in their choice alone: the rest is encoded once.

    Args:
        empty: a chunk without a choice.
    """

    def __init__(self, empty: msgspec.Struct) -> None:
        head, choices, end = event(empty).rpartition(b'"choices":[')
        assert end == b"]}\n\n", "the choices stand last in a chunk"
        self._head, self._end = head + choices, end

    def event(self, choice: msgspec.Struct) -> bytes:
        """The chunk with this choice."""
        return self._head + _encode(choice) + self._end


async def event_stream(request: Request, events: Events, last_words: LastWords = done) -> Response:
    """A reply that sends `events`, once the first of them exists.

    Until then whatever `events` raises goes to the caller, so that it can still become an HTTP
    status; after that it goes into the last words.
    """
    try:
        first = await while_connected(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return _EventStream(first, events, last_words)


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: Events, last_words: LastWords) -> None:
        self.first = first
        self.rest = rest
        self.last_words = last_words
        self.background = None
        self.status_code = 200
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send, scope[DIRECT_SEND]))
        except ClientDisconnect:
            logger.debug("%s: the client went away while its reply was streamed", scope["path"])
        finally:
            await self.rest.aclose()

    async def _send_all(self, send_head: Send, send: Send) -> None:
        status = {"status": self.status_code, "headers": self.raw_headers}
        await send_head({"type": "http.response.start", **status})
        await send(_part(self.first))
        failure: Exception | None = None
        try:
            async for chunk in self.rest:
                await send(_part(chunk))
        except Exception as error:
            is_bug = not isinstance(error, EXPECTED)
            logger.error("A stream failed: %s", error, exc_info=is_bug)
            failure = error
        await send({"type": "http.response.body", "body": self.last_words(failure)})


def _part(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}
