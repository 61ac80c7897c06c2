"""How API processes and the engine process talk: msgpack messages over local sockets.

An API process sends Start once, then what is to be done; closing its side is the order to close,
or, for those that joined later, to forget it. The engine process tells the first of its Loading,
answers Ready or Failed, then sends each its News after a step. One for vectors and scores answers
PoolingReady or Failed, then each Compute with Computed. One that follows rank 0 of several hosts
says Joined or Failed (see `paged.runtime.hosts`).
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec

from paged.runtime.config import EngineConfig
from paged.runtime.engine_state import EngineState
from paged.runtime.logs import LogFormat
from paged.runtime.memory import MemoryPlan
from paged.runtime.messages import EngineRequest, EngineStats, SequenceOutput
from paged.runtime.pooling.abilities import Abilities
from paged.runtime.pooling.grid import Grid

_LENGTH_BYTES = 4
_READ_BYTES = 2**18


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A tag and the fields' values, without their names."""


class Start(_Message, frozen=True):
    """What to load, if that is not done.

    Attributes:
        log_level: that of the API process.
        about: what the lines of the engine process are about.
        door: descriptor of a listening socket at which other API processes join; None for none.
        log_format: that of the API process.
    """

    config: EngineConfig
    log_level: int
    about: str = ""
    door: int | None = None
    log_format: LogFormat = "text"


class Add(_Message, frozen=True):
    """Queue a request, whose id no live one has."""

    request: EngineRequest


class Abort(_Message, frozen=True):
    """End a request, or one of its sequences. An id that is not live is ignored."""

    request_id: str
    index: int | None


class ResetPrefixCache(_Message, frozen=True):
    """Forget all cached pages; answered by WasReset."""


class Look(_Message, frozen=True):
    """Tell what there is to see of the engine; answered by Looked."""


class Loading(_Message, frozen=True):
    """How far the start has got; see `paged.models.reports.Report`."""

    label: str
    unit: str
    done: int
    total: int


class Ready(_Message, frozen=True):
    """The model is loaded and compiled: what `EngineCore` says of itself."""

    max_model_len: int
    vocab_size: int
    memory: MemoryPlan
    stats: EngineStats
    startup: dict[str, float]


class News(_Message, frozen=True):
    """What a step gave that an API process asked for.

    Attributes:
        num_taken: messages of the API process, Start left out, that the core had heard before it.
    """

    outputs: list[SequenceOutput]
    stats: EngineStats
    num_taken: int


class WasReset(_Message, frozen=True):
    """Whether cached pages were forgotten."""

    done: bool


class Looked(_Message, frozen=True):
    """What there was to see."""

    state: EngineState


class Failed(_Message, frozen=True):
    """The last message of an engine process: the error that it ends with.

    Attributes:
        kind: "module:class" of the error, one of Paged's own.
        message: for the user.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        kind = type(error)
        return cls(f"{kind.__module__}:{kind.__qualname__}", str(error))

    def error(self) -> Exception:
        """The error made again."""
        module, _, name = self.kind.partition(":")
        error: Exception = getattr(import_module(module), name)(self.message)
        return error


class PoolingReady(_Message, frozen=True):
    """A model for vectors or scores is loaded and compiled; see `paged.runtime.pooling`."""

    grid: Grid
    abilities: Abilities
    max_model_len: int
    lowercase: bool


class Compute(_Message, frozen=True):
    """Compute a batch of so many rows of so many places, packed as the runner does it."""

    rows: int
    length: int
    packed: bytes


class Computed(_Message, frozen=True):
    """The vectors of a batch, float32 of `size` numbers each; batches keep their order."""

    size: int
    vectors: bytes
    num_compiles: int


class Joined(_Message, frozen=True):
    """A process that follows rank 0 of several has loaded and compiled the model."""


class Closing(_Message, frozen=True):
    """The engine process has heard that it is to close, which takes so many seconds at most."""

    seconds: float


ToEngine = Start | Add | Abort | ResetPrefixCache | Look
FromEngine = Loading | Ready | News | WasReset | Looked | Closing | Failed
FromFollower = Loading | Joined | Failed
ToPooling = Start | Compute
FromPooling = Loading | PoolingReady | Computed | Failed


class Channel:
    """One end of the connection. Each message is its length, then msgpack. Not thread-safe.

    Sending never waits: what the other side is not ready to take is kept, and sent by later calls.

    Args:
        connection: a stream socket; the channel owns it.
        incoming: union of the messages that come.
    """

    def __init__(self, connection: socket.socket, incoming: Any) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._received, self._unsent = bytearray(), bytearray()
        self._ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def awaited(self) -> int:
        """What to poll for, so that `receive` gets something done."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    @property
    def is_readable(self) -> bool:
        """Whether messages, parts of one or the end have come."""
        return self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait until messages, parts of one or the end have come; False if they do not."""
        return bool(self._poll(select.POLLIN, timeout=1000 * seconds))

    def send(self, message: msgspec.Struct) -> None:
        body = self._encoder.encode(message)
        self._unsent += len(body).to_bytes(_LENGTH_BYTES, "little") + body
        self._send_unsent()

    def flush(self) -> None:
        """Wait until everything is sent, or nobody is there to take it."""
        while self._unsent:
            self._poll(select.POLLOUT)
            self._send_unsent()

    def receive(self, *, wait: bool) -> list[Any]:
        """The messages that have come; with `wait`, sleep until something comes, if only a part.

        Raises:
            EOFError: the other side has closed, and all that it sent was received.
        """
        if wait:
            self._poll(self.awaited)
        self._send_unsent()
        while self._read() == _READ_BYTES:
            pass
        messages = [self._decoder.decode(body) for body in self._complete()]
        if self._ended and not messages:
            raise EOFError("the other side has closed the connection")
        return messages

    def close_sending(self) -> None:
        """The other side receives what was sent, then the end."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def _poll(self, events: int, timeout: float | None = None) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(self._socket, events)
        return poll.poll(timeout)

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # receiving will find the end
            self._unsent.clear()

    def _read(self) -> int:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return 0
        except ConnectionResetError:  # it closed before it had read everything
            data = b""
        self._ended = not data
        self._received += data
        return len(data)

    def _complete(self) -> Iterator[bytes]:
        """Take the whole messages off what was received."""
        start = 0
        while (body := start + _LENGTH_BYTES) <= len(self._received):
            end = body + int.from_bytes(self._received[start:body], "little")
            if end > len(self._received):
                break
            yield bytes(self._received[body:end])
            start = end
        del self._received[:start]
