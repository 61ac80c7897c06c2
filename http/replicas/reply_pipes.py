"""Replies on their way from replicas to routers, by TCP: streams of Ray's own cost much more.

A router listens; a replica connects when a request first comes from there, and sends the replies to
all of that router's requests through one connection, each part with its request's number.

Whoever waits here is told when what it waits for cannot come: a connection that breaks fails what
came by it, one whose other end is silent breaks, and a reply has seconds to come behind its call.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from starlette.types import Message

from paged.runtime.errors import Overloaded

_LENGTH_BYTES = 4
_KEY_BYTES = 32
# Bytes that wait to be sent on a connection before who writes has to wait.
_MOST_WAITING = 2**18
_BODY = "http.response.body"
# What a reply's end may take behind that of its call: by then all of it is in buffers of this pipe.
_SECONDS_ON_THE_WAY = 10.0
_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_TELL_THE_KEY = 10.0
# After which a connection is taken for broken, where what is sent on it is not acknowledged: a
# machine that loses its power says nothing, and TCP alone would wait for a quarter of an hour.
_SECONDS_OF_SILENCE = 30


class ReplicaLost(RuntimeError):
    """A replica was gone before its reply was whole."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A message of ASGI, or the end of a reply.

    Attributes:
        number: of the request, at its router.
        status, headers: of what begins a reply.
        more: whether more of the body follows; None for the end, after which nothing comes.
    """

    number: int
    body: bytes = b""
    more: bool | None = True
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Part).decode


def _part(number: int, message: Message) -> Part:
    if message["type"] == "http.response.start":
        return Part(number, status=message["status"], headers=list(message["headers"]))
    return Part(number, message.get("body", b""), message.get("more_body", False))


def _message(part: Part) -> Message:
    if part.status:
        head = {"status": part.status, "headers": part.headers}
        return {"type": "http.response.start", **head}
    return {"type": _BODY, "body": part.body, "more_body": part.more}


@dataclass(frozen=True)
class Address:
    """Where a router listens.

    Attributes:
        key: that whoever connects must know.
    """

    host: str
    port: int
    key: bytes


@dataclass
class Inbox:
    """What has come of the reply to a request.

    Attributes:
        number: of the request.
        source: the connection by which it comes; None as long as nothing has.
    """

    number: int
    source: asyncio.Protocol | None = None
    _came: list[Message] = field(default_factory=list)
    _is_ended: bool = False
    _error: Exception | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, part: Part) -> None:
        """Parts of a body that come before they are read are joined: a router that is slow has the
        fewer of them to pass on.
        """
        last = self._came[-1] if self._came else None
        if part.more is None:
            self._is_ended = True
        elif last is not None and last["type"] == _BODY and not part.status:
            last["body"] += part.body
            last["more_body"] = part.more
        else:
            self._came.append(_message(part))
        self._news.set()

    def fail(self, error: Exception) -> None:
        """No more will come."""
        self._error = error
        self._news.set()

    def expect_the_end(self) -> None:
        """All has been sent: what is still on its way comes soon, or never."""
        if not self._is_ended:
            lost = ReplicaLost("the end of the reply was lost on its way")
            asyncio.get_running_loop().call_later(_SECONDS_ON_THE_WAY, self.fail, lost)

    async def read(self) -> Sequence[Message]:
        """All that is there, at least one; none at the end. Raises what it was failed with."""
        while not self._came:
            if self._is_ended:
                return []
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        came, self._came = self._came, []
        return came


async def watch(call: Awaitable[None], inbox: Inbox) -> None:
    """Tell an inbox that the call which sends its reply has ended, however it did."""
    try:
        await call
    except Overloaded as error:
        inbox.fail(error)
    except asyncio.CancelledError:
        inbox.fail(ReplicaLost("the call was cancelled"))
        raise
    except Exception as error:
        inbox.fail(ReplicaLost(str(error)))
    else:
        inbox.expect_the_end()


class Inboxes:
    """The router's end of all pipes."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._numbers = count(1)
        self._open: dict[int, Inbox] = {}
        self._listening: asyncio.Task[Address] | None = None

    async def address(self, host: str) -> Address:
        """Where they are, from the first call on: at any free port. Raises OSError."""
        if self._listening is None or (self._listening.done() and self._listening.exception()):
            self._listening = asyncio.create_task(self._listen(host))
        return await asyncio.shield(self._listening)  # the others wait for it too

    async def _listen(self, host: str) -> Address:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Incoming(self._open, self._key), host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return Address(host, port, self._key)

    def open(self) -> Inbox:
        """One for a new request."""
        inbox = Inbox(next(self._numbers))
        self._open[inbox.number] = inbox
        return inbox

    def close(self, inbox: Inbox) -> None:
        """What still comes for it is dropped."""
        del self._open[inbox.number]


class _Incoming(asyncio.Protocol):
    """A connection from a replica, which begins with the key."""

    def __init__(self, inboxes: Mapping[int, Inbox], key: bytes) -> None:
        self._inboxes, self._key = inboxes, key
        self._is_known = False
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        _break_if_silent(transport)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(_SECONDS_TO_TELL_THE_KEY, transport.close)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        start = 0
        if not self._is_known:
            if len(data) < _KEY_BYTES:
                self._rest = data
                return
            if not hmac.compare_digest(data[:_KEY_BYTES], self._key):
                self._transport.close()
                return
            self._patience.cancel()
            self._is_known, start = True, _KEY_BYTES
        while len(data) >= (begin := start + _LENGTH_BYTES):
            end = begin + int.from_bytes(data[start:begin], "big")
            if len(data) < end:
                break
            self._take(_decode(data[begin:end]))
            start = end
        self._rest = data[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        for inbox in list(self._inboxes.values()):
            if inbox.source is self:
                inbox.fail(ReplicaLost("the connection to the replica broke"))

    def _take(self, part: Part) -> None:
        if (inbox := self._inboxes.get(part.number)) is not None:
            inbox.source = self
            inbox.take(part)


class Pipes:
    """The replica's end of all pipes."""

    def __init__(self) -> None:
        self._pipes: dict[Address, asyncio.Task[Pipe]] = {}

    async def to(self, address: Address) -> Pipe:
        """The connection there. Raises OSError if there is none."""
        if (task := self._pipes.get(address)) is None or _is_over(task):
            # Routers come and go, each with an address of its own.
            self._pipes = {key: each for key, each in self._pipes.items() if not _is_over(each)}
            task = self._pipes[address] = asyncio.create_task(_connected(address))
        return await asyncio.shield(task)


def _is_over(task: asyncio.Task[Pipe]) -> bool:
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or task.result().gone.is_set()


async def _connected(address: Address) -> Pipe:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_SECONDS_TO_CONNECT):
        _, pipe = await loop.create_connection(Pipe, address.host, address.port)
    pipe.write(address.key)
    return pipe


class Pipe(asyncio.Protocol):
    """A connection to a router.

    Attributes:
        gone: set once nothing gets there any more.
    """

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self._waiting: list[bytes] = []
        self._has_room = asyncio.Event()
        self._has_room.set()

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        _break_if_silent(transport)
        transport.set_write_buffer_limits(_MOST_WAITING)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        self._has_room.set()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    async def send(self, number: int, message: Message) -> None:
        """Send on a part, once there is room. Raises ConnectionError if the router has gone."""
        await self._has_room.wait()
        self._send(_part(number, message))

    def end(self, number: int) -> None:
        """Say that a reply ends here, whole or not. Raises ConnectionError as `send` does."""
        self._send(Part(number, more=None))

    def _send(self, part: Part) -> None:
        if self.gone.is_set():
            raise ConnectionError("the connection to the router broke")
        packed = _encode(part)
        self.write(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed)

    def write(self, data: bytes) -> None:
        """Send it, with what else comes in this turn of the loop: streams get tokens together."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(data)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._waiting))
        self._waiting.clear()


def _break_if_silent(transport: asyncio.Transport) -> None:
    """Whether or not there is anything to send."""
    end = transport.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _SECONDS_OF_SILENCE // 3),
        (socket.TCP_KEEPINTVL, _SECONDS_OF_SILENCE // 6),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, _SECONDS_OF_SILENCE * 1000),
    ):
        end.setsockopt(socket.IPPROTO_TCP, option, value)
