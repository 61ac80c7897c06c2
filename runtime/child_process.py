"""A Python process at the other end of a socket, from its start to how it ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paged.runtime.ending import TIME_TO_BE_KILLED, TIME_TO_EXIT

PEER_LOST = 75
"""Exit status of a process that ends because another host's part of its engine has."""


class ChildProcess:
    """A new interpreter, never a fork: JAX has threads. It shares our standard error.

    Args:
        program: the interpreter's arguments; the descriptor of a socket is put behind them.
        shared: descriptors that it inherits under the numbers they have here.
        environment: its variables where they are not this process's.

    Attributes:
        connection: the other end of that socket; the caller closes it.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        shared: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), *shared)
            self._process = _spawn(program, descriptors, environment or {})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._wait(0) is None

    def wait(self) -> None:
        """Wait until it has ended; other threads may wait too."""
        self._process.wait()

    def how_it_ended(self) -> str:
        """What became of a process that has closed the connection."""
        status = self._wait(TIME_TO_EXIT)
        if status is None:
            return "the engine process hung up"
        if status == PEER_LOST:
            return "a process of the engine is gone, as the log of this one says"
        if status < 0:
            return f"the engine process was ended by signal {-status} ({signal.strsignal(-status)})"
        return f"the engine process ended with exit status {status}"

    def end(self, seconds: float) -> None:
        """Give it some seconds to leave by itself, then kill it. Idempotent."""
        if self._wait(seconds) is None:
            self._process.kill()
            self._wait(TIME_TO_BE_KILLED)

    def _wait(self, seconds: float) -> int | None:
        """The exit status, a signal as a negative number; None if it is still there."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None


class JoinedProcess:
    """A process that somebody else has started, and ends.

    Args:
        door: path of the socket at which it takes connections.

    Attributes:
        connection: the caller closes it.
    """

    def __init__(self, door: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(door)

    def how_it_ended(self) -> str:
        return "the engine process hung up"

    def end(self, seconds: float) -> None:
        """Nothing: it serves others."""


def _spawn(
    program: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """It inherits all descriptors, and is told the first."""
    # It finds the modules that this process finds, and none of the current folder's besides.
    path = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path)
    with _signals_blocked():
        return subprocess.Popen(
            [sys.executable, "-P", *program, str(descriptors[0])],
            env={**os.environ, **environment, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
        )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes started meanwhile never hear SIGINT and SIGTERM.

    Terminals and supervisors send them to whole groups, but this process alone says when to end.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
