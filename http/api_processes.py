"""Several API processes for the same engines: the first starts the others, and ends them.

All listen at one port, among whose sockets the kernel spreads the connections, or at one Unix
socket, where whoever is first takes them. The others join each engine process at its door. Their
connection to the first tells them what to do, and that it is time to finish; it tells the first
that they are ready.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import msgspec

from paged.http.entries import Entry
from paged.http.options import ServeOptions
from paged.http.peers import Peers
from paged.runtime.child_process import ChildProcess
from paged.runtime.errors import ConfigError
from paged.runtime.wire import Channel

_PROGRAM = ("-m", "paged.http.api_process")


class Setup(msgspec.Struct, frozen=True):
    """What another API process is told.

    Attributes:
        entries: the models.
        doors: paths of their engine processes' sockets.
        listener, private: descriptors of sockets, for clients and for the other API processes.
    """

    entries: list[Entry]
    options: ServeOptions
    peers: Peers
    doors: list[str]
    listener: int
    private: int


class IsReady(msgspec.Struct, frozen=True):
    """Its answer, once it could serve."""


class ApiProcesses:
    """The other API processes, seen from the first.

    Args:
        entries, options: as of the first; `api_server_count` counts it.
        listener: its socket, bound, whose port may be shared.

    Attributes:
        doors: where the engine processes are to take their connections.
        private: where the first is asked by the others.
        peers: the others, from the first.
    """

    def __init__(
        self, entries: Sequence[Entry], options: ServeOptions, listener: socket.socket
    ) -> None:
        self._folder = TemporaryDirectory(prefix="paged-")
        folder = Path(self._folder.name)
        doors = [str(folder / f"engine-{number}") for number in range(len(entries))]
        paths = [str(folder / f"api-{number}") for number in range(options.api_server_count)]
        self.doors = list(map(_listening, doors))
        self.private, *others = map(_listening, paths)
        self.peers = _peers(paths, 0)
        self._processes: list[tuple[ChildProcess, Channel]] = []
        self._told_at = 0.0  # to finish; on the monotonic clock
        for number, private in enumerate(others, start=1):
            with private, _another(listener) as shared:
                fds = (shared.fileno(), private.fileno())
                process = ChildProcess(_PROGRAM, shared=fds)
            channel = Channel(process.connection, IsReady)
            channel.send(Setup(list(entries), options, _peers(paths, number), doors, *fds))
            self._processes.append((process, channel))

    def __enter__(self) -> ApiProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(0)

    @property
    def are_running(self) -> bool:
        return all(process.is_running for process, _ in self._processes)

    def await_ready(self) -> None:
        """Return when all could serve. Raises ConfigError if one ends instead."""
        for _, channel in self._processes:
            try:
                while not channel.receive(wait=True):
                    pass
            except EOFError:
                message = "An API process has ended before it was ready; its log says why"
                raise ConfigError(message) from None

    def finish(self) -> None:
        """Let them answer what they have begun, take nothing new, and leave. Idempotent."""
        self._told_at = self._told_at or time.monotonic()
        for _, channel in self._processes:
            with suppress(OSError):  # of one that has left
                channel.close_sending()

    def end(self, seconds: float) -> None:
        """Give them so many seconds to finish, from when they were first told. Idempotent."""
        self.finish()
        until = self._told_at + seconds
        for process, channel in self._processes:
            process.end(max(until - time.monotonic(), 0))
            channel.close()
        self._processes.clear()
        for each in (*self.doors, self.private):
            each.close()
        self._folder.cleanup()


def _peers(paths: list[str], number: int) -> Peers:
    return Peers((*paths[:number], *paths[number + 1 :]), is_first=number == 0)


def _listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def _another(listener: socket.socket) -> socket.socket:
    """One more socket at the same port, or the same one again if it is a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return listener.dup()
    other = socket.socket(listener.family, socket.SOCK_STREAM)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other.bind(listener.getsockname())
    return other
