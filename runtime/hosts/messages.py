"""What processes of one engine say to each other, as msgpack over TCP.

Rank 0 greets whoever connects with Hello, is answered by Join, and says Welcome or Refused. When
all are there it says Begin to each, which answers Following when it is ready, or Failing. From then
on rank 0 alone speaks: Call after Call, and End.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

_LENGTH_BYTES = 4
# Of a message from somebody whose key nobody has seen yet.
MOST_AT_FIRST = 2**16
_MOST = 2**32 - 1


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A tag and the fields' values, without their names."""


class Hello(_Message, frozen=True):
    """Random bytes, which whoever knows the key is to sign."""

    nonce: bytes


class Join(_Message, frozen=True):
    """Who wants to be part of the engine.

    Attributes:
        nonce: random bytes of its own.
        proof: that it knows the key, see `paged.runtime.hosts.handshake`.
        facts: by name, what must be the same in all processes.
    """

    rank: int
    nonce: bytes
    proof: bytes
    facts: dict[str, str]


class Welcome(_Message, frozen=True):
    """It is part of the engine; `proof` is that rank 0 knows the key."""

    proof: bytes


class Refused(_Message, frozen=True):
    """It is not, for this reason."""

    reason: str


class Begin(_Message, frozen=True):
    """All are there: the address at which `jax.distributed` finds rank 0."""

    coordinator: str


class Following(_Message, frozen=True):
    """The model is loaded and compiled."""


class Failing(_Message, frozen=True):
    """It cannot be, for this reason."""

    reason: str


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """An array: its dtype as numpy writes it, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, array: NDArray[Any] | np.generic) -> Packed:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> NDArray[Any]:
        return np.frombuffer(self.content, self.dtype).reshape(self.shape)


class Call(_Message, frozen=True):
    """Call a program, by its number among all, with these arrays of the host."""

    program: int
    inputs: list[Packed]


class End(_Message, frozen=True):
    """The engine is closed."""


ToLeader = Join | Following | Failing
ToFollower = Hello | Welcome | Refused | Begin | Call | End


class Line:
    """A connection between two processes of one engine.

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

    def send(self, message: _Message) -> None:
        """Raises OSError if the other side is gone."""
        body = self._encoder.encode(message)
        self._socket.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

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
        return self._decoder.decode(self._exactly(length, end))

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
