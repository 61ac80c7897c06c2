"""A connection over TCP between two processes of ours: msgpack messages, each behind its length."""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections.abc import Buffer
from contextlib import suppress
from typing import Any

import msgspec

_LENGTH_BYTES = 4
_MOST = 2**32 - 1


class Line:
    """Sends and receives messages, and content behind them that is no message.

    One thread may receive while another one sends. Both wait; that the other side's host is gone is
    found within some seconds, as if it had hung up.

    Args:
        connection: a TCP socket; the line owns it.
        incoming: union of the messages that come.
    """

    def __init__(self, connection: socket.socket, incoming: Any) -> None:
        connection.settimeout(None)
        _notice_silence(connection)
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, content: Buffer | None = None) -> None:
        """Send a message, and what follows it. Raises OSError if the other side is gone."""
        body = self._encoder.encode(message)
        self._socket.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        if content is not None:
            self._socket.sendall(content)

    def receive(self, *, within: float | None = None, most: int = _MOST) -> Any:
        """The next message.

        Args:
            within: seconds that it may take.
            most: bytes that it may have.

        Raises:
            EOFError: the other side is gone.
            TimeoutError, ValueError: nothing came in time; or what came is no message.
        """
        end = None if within is None else time.monotonic() + within
        length = int.from_bytes(self._exactly(_LENGTH_BYTES, end), "little")
        if length > most:
            raise ValueError(f"a message of {length} bytes, where {most} are the most")
        body = self._exactly(length, end)
        try:
            return self._decoder.decode(body)
        except RecursionError as error:  # what is too much for the decoder is no message either
            raise ValueError(str(error)) from error

    def receive_into(self, content: memoryview) -> None:
        """Fill memory with what follows a message. Raises EOFError: the other side is gone."""
        try:
            while content:
                count = self._socket.recv_into(content)
                if not count:
                    raise EOFError("the other side has closed the connection")
                content = content[count:]
        except OSError as error:
            raise EOFError(f"the connection is gone: {error}") from error

    def close(self) -> None:
        """The other side finds the end behind what was sent, also if somebody receives here."""
        with suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int, end: float | None) -> bytes:
        received = bytearray()
        try:
            while len(received) < count:
                if end is not None:
                    self._socket.settimeout(max(end - time.monotonic(), 1e-3))
                part = self._socket.recv(min(count - len(received), 2**20))
                if not part:
                    raise EOFError("the other side has closed the connection")
                received += part
            if end is not None:
                self._socket.settimeout(None)
        except OSError as error:  # it was reset, is silent for too long, or was closed here
            if end is not None and isinstance(error, TimeoutError):
                raise
            raise EOFError(f"the connection is gone: {error}") from error
        return bytes(received)


def proof(variable: str, *said: bytes) -> bytes:
    """What only who knows the key in an environment variable can say to both sides' words."""
    key = os.environ.get(variable, "").encode()
    return hmac.digest(key, b"|".join(said), "sha256")


def _notice_silence(connection: socket.socket) -> None:
    """Have the system ask a silent peer whether it is there, and send small messages at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": 5,  # seconds
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 12_000,  # milliseconds
    }.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
