"""The device of an engine for vectors and scores in a process of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

import numpy as np

from paged.models.reports import Report, report
from paged.runtime.child_process import ChildProcess
from paged.runtime.config import EngineConfig
from paged.runtime.ending import TIME_TO_CLOSE
from paged.runtime.errors import EngineDead
from paged.runtime.logs import current_format, current_model
from paged.runtime.pooling.runner import pack
from paged.runtime.pooling.setup import Ready
from paged.runtime.pooling.vectors import Vectors
from paged.runtime.pooling.waiting import Batch
from paged.runtime.wire import (
    Channel,
    Compute,
    Computed,
    Failed,
    FromPooling,
    Loading,
    PoolingReady,
    Start,
)

logger = logging.getLogger(__name__)

_PROGRAM = ("-m", "paged.runtime.pooling.process")


@dataclass(frozen=True)
class Launched:
    """A batch that is in the process."""

    runner: RemoteRunner

    def read(self) -> Vectors:
        """Wait for the vectors [rows, N]. Batches are read in the order of their launch."""
        return self.runner.next_vectors()


def prepare_apart(config: EngineConfig) -> Ready[RemoteRunner]:
    """As `prepare_pooling`, in a process of its own. Raises as `RemoteRunner`."""
    runner = RemoteRunner(config)
    said = runner.ready
    return Ready(runner, said.grid, said.abilities, said.max_model_len, said.lowercase)


class RemoteRunner:
    """Starts a process and is a `Runner` that passes batches on to it. Not thread-safe.

    Attributes:
        ready: what the process says of the model.
        num_compiles: programs that it compiled since it was ready.
        pid: of the process.

    Raises:
        ConfigError, CheckpointError, ...: what the process failed to start with.
        EngineDead: it died before it was ready.
    """

    def __init__(self, config: EngineConfig, *, program: Sequence[str] = _PROGRAM) -> None:
        self.num_compiles = 0
        self._why_killed: str | None = None
        self._computed: deque[Vectors] = deque()
        self._process = ChildProcess(program)
        self._channel = Channel(self._process.connection, FromPooling)
        self.pid = self._process.pid
        logger.info("The engine runs in process %d", self.pid)
        try:
            self.ready = self._start(config)
        except BaseException:
            self._process.end(0)
            self._channel.close()
            raise

    def launch(self, batch: Batch) -> Launched:
        self._channel.send(Compute(*batch.shape, pack(batch).tobytes()))
        self._channel.flush()  # the process reads between batches
        return Launched(self)

    def next_vectors(self) -> Vectors:
        while not self._computed:
            for message in self._receive():
                assert isinstance(message, Computed), "it is ready once"
                vectors = np.frombuffer(message.vectors, np.float32).reshape(-1, message.size)
                self._computed.append(vectors)
                self.num_compiles = message.num_compiles
        return self._computed.popleft()

    def watch(self, when_gone: Callable[[str], object]) -> None:
        """Have it said when the process has ended, also when nothing is computed, and how."""

        def wait() -> None:
            self._process.wait()
            when_gone(self._how_it_ended())

        run = partial(copy_context().run, wait)  # log lines there are about the same model
        threading.Thread(target=run, name="paged-watch", daemon=True).start()

    def kill(self, reason: str) -> None:
        """End the process at once, from any thread."""
        self._why_killed = reason
        self._process.end(0)

    def close(self) -> None:
        """Wait until the process is gone."""
        self._channel.close_sending()
        self._process.end(TIME_TO_CLOSE)
        self._channel.close()

    def _how_it_ended(self) -> str:
        return self._why_killed or self._process.how_it_ended()

    def _start(self, config: EngineConfig) -> PoolingReady:
        level = logging.getLogger("paged").getEffectiveLevel()
        how = current_format()
        self._channel.send(Start(config, level, current_model(), log_format=how))
        while True:
            for message in self._receive():
                assert isinstance(message, PoolingReady), "nothing was asked yet"
                return message

    def _receive(self) -> list[PoolingReady | Computed]:
        """Wait until something comes. Raises what the process failed with."""
        try:
            messages = self._channel.receive(wait=True)
        except EOFError:
            raise EngineDead(self._how_it_ended()) from None
        for message in messages:
            if isinstance(message, Failed):
                raise message.error()
            if isinstance(message, Loading):
                report(Report(message.label, message.unit, message.done, message.total))
        return [message for message in messages if not isinstance(message, Loading)]
