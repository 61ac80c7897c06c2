"""What a connection may take of the server before there is a request: so much memory, so long."""

from __future__ import annotations

import asyncio
import socket
from asyncio.events import TimerHandle
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paged.http.api.errors import ApiError, error_response

MAX_HEAD_SIZE = 64 * 1024
"""Bytes of a request's first line and headers. What comes in one piece with them may be more."""

MAX_HEADERS = 256
"""Headers that a request may have."""

HEAD_TIMEOUT = 60.0
"""Seconds until they must be there."""

REST_TIMEOUT = 30.0
"""Seconds that are listened on to a request that has been answered before its end."""

SEND_TIMEOUT = 120.0
"""Seconds that a client may take nothing of what is sent to it."""

# A client that is gone without a word is noticed after some 60 s, also while it waits for a reply.
_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class Connection(HttpToolsProtocol):
    """uvicorn's, which waits for ever and keeps whatever comes."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._in_head = True  # and not in a body
        # Bytes of the head, or since the last of the body: without those of the piece in which
        # it began, or in which that was.
        self._size = 0
        self._timer: TimerHandle | None = None
        self._blocked: TimerHandle | None = None  # while the client takes nothing
        self._last: TimerHandle | None = None  # while it may not have taken the end of a reply

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEAD_TIMEOUT)
        with suppress(OSError):  # of a Unix socket, whose peer cannot be gone without a word
            for option in _ALIVE:
                transport.get_extra_info("socket").setsockopt(*option)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._is_taken()
        if self._last is not None:
            self._last.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._size += len(data)
        super().data_received(data)
        self._stay_idle()
        if self._size > MAX_HEAD_SIZE:
            message = f"A request's headers may have {MAX_HEAD_SIZE} bytes, got {self._size}"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)

    def _stay_idle(self) -> None:
        """Go on counting how long, which uvicorn does not if what came begins no request."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        if is_answered and self._in_head and self._timer is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._await_taking()

    def on_message_begin(self) -> None:
        if self.transport.is_closing():  # what comes behind a refusal
            return
        super().on_message_begin()
        self._wait(HEAD_TIMEOUT)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._stop_waiting()
        if len(self.headers) > MAX_HEADERS:
            message = f"A request may have {MAX_HEADERS} headers, got {len(self.headers)}"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
            return
        self._in_head, self._size = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        self._size = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._stop_waiting()
        self._in_head, self._size = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_taking()
        if not self._in_head and not self.transport.is_closing():
            self._wait(REST_TIMEOUT)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._blocked = self.loop.call_later(SEND_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_taken()

    def _is_taken(self) -> None:
        if self._blocked is not None:
            self._blocked.cancel()
            self._blocked = None

    def _await_taking(self) -> None:
        """Give up on a client that leaves the rest of a reply where it is.

        So little of it that writing was not paused, or the connection was closed meanwhile: the
        transport would wait for ever until it can send it.
        """
        if self._last is not None:
            self._last.cancel()
        size = self.transport.get_write_buffer_size()
        self._last = self.loop.call_later(SEND_TIMEOUT, self._check_taking, size)

    def _check_taking(self, size: int) -> None:
        left = self.transport.get_write_buffer_size()
        is_replying = self.cycle is not None and not self.cycle.response_complete
        if left and left == size and (not is_replying or self.transport.is_closing()):
            self.transport.abort()
        elif left:
            self._await_taking()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._out_of_time)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _out_of_time(self) -> None:
        message = f"A request's headers must be there within {HEAD_TIMEOUT:g} s"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Say why, unless something else is being said, and hang up."""
        if self.transport.is_closing():
            return
        nothing_said = self.cycle is None or self.cycle.response_complete
        if self._in_head and self._size and nothing_said:
            reply = error_response(ApiError(status, message, status.phrase), path="")
            lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"connection: close"]
            lines += [name + b": " + value for name, value in reply.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(reply.body)]))
        self.transport.close()
        self._await_taking()
