"""The engine core in a process of its own, as the rest of the engine sees it."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from paged.models.reports import Report, report
from paged.runtime.child_process import ChildProcess, JoinedProcess
from paged.runtime.config import EngineConfig
from paged.runtime.ending import LONGEST_SAVING, TIME_TO_CLOSE, TIME_TO_EXIT
from paged.runtime.engine_state import EngineState
from paged.runtime.errors import EngineDead, InvalidRequest
from paged.runtime.logs import current_format, current_model
from paged.runtime.messages import EngineRequest, EngineStats, SequenceOutput
from paged.runtime.wire import (
    Abort,
    Add,
    Channel,
    Closing,
    Failed,
    FromEngine,
    Loading,
    Look,
    Looked,
    News,
    Ready,
    ResetPrefixCache,
    Start,
    WasReset,
)

logger = logging.getLogger(__name__)

_PROGRAM = ("-m", "paged.runtime.engine_process")


@dataclass(frozen=True)
class _Live:
    """A request that has not ended: the number of its Add message, and its unended sequences."""

    number: int
    indices: set[int]


class RemoteCore:
    """Starts an engine process and keeps `Core`'s protocol with it. Not thread-safe.

    An abort is answered here, the process is told, and what it had on the way is dropped. When the
    process dies, every live sequence ends with finish reason "error", and each later call raises
    EngineDead.

    Args:
        config: what the process loads.
        program: of the process.
        door: where other API processes may join it; listening.
        process: one that runs already, in place of a new one.

    Attributes:
        max_model_len, vocab_size, memory, startup: those of the core.
        pid: of the process, if it was started here.

    Raises:
        ConfigError, CheckpointError, ...: what the core failed to start with.
        EngineDead: the process died before it was ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        program: Sequence[str] = _PROGRAM,
        door: socket.socket | None = None,
        process: JoinedProcess | None = None,
    ) -> None:
        self._live: dict[str, _Live] = {}
        self._num_sent = 0
        self._news: list[News] = []
        self._ready: Ready | None = None
        self._answers: list[bool] = []
        self._viewers: deque[Callable[[EngineState], None]] = deque()
        self._failure: Failed | None = None
        self._is_closed = False
        self._why_killed: str | None = None
        descriptor = None if door is None else door.fileno()
        shared = () if descriptor is None else (descriptor,)
        self._process = process or ChildProcess(program, shared=shared)
        if isinstance(self._process, ChildProcess):
            self.pid = self._process.pid
            logger.info("The engine runs in process %d", self.pid)
        self._channel = Channel(self._process.connection, FromEngine)
        try:
            ready = self._start(config, descriptor)
        except BaseException:
            self._process.end(0)
            self._channel.close()
            raise
        self.max_model_len, self.vocab_size = ready.max_model_len, ready.vocab_size
        self.memory, self.startup = ready.memory, ready.startup
        self._stats = ready.stats

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to say at once."""
        return bool(self._news) or self._failure is not None or self._channel.is_readable

    def fileno(self) -> int:
        return self._channel.fileno()

    def add(self, request: EngineRequest) -> None:
        self._check_alive()
        if request.request_id in self._live:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use by a running request", "request_id"
            )
        _check_types(request)
        self._send(Add(request))
        self._live[request.request_id] = _Live(self._num_sent, set(range(request.params.n)))

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        live = self._live.get(request_id)
        ended = [i for i in sorted(live.indices) if index in (None, i)] if live else []
        if ended:
            self._send(Abort(request_id, index))
        return [self._end(request_id, i, "abort") for i in ended]

    def step(self) -> list[SequenceOutput]:
        """Wait for news of the process, and take all that has come."""
        if not self._news and self._failure is None:
            self._receive()
        news, self._news = self._news, []
        outputs = [item for each in news for item in self._expected(each)]
        if self._failure is not None:
            outputs += self._end_all(self._failure.message)
        if not outputs:
            self._check_alive()
        return outputs

    def stats(self) -> EngineStats:
        """As of the last news taken."""
        return self._stats

    def reset_prefix_cache(self) -> bool:
        """Waits for the answer, which comes between two steps."""
        self._check_alive()
        self._send(ResetPrefixCache())
        while not self._answers:
            self._receive()
            self._check_alive()
        return self._answers.pop()

    def look(self, deliver: Callable[[EngineState], None]) -> None:
        """Have a close look at the engine delivered, by `step`, when the process has taken it."""
        self._check_alive()
        self._viewers.append(deliver)
        self._send(Look())

    def kill(self, reason: str) -> None:
        """End the process at once, from any thread, unless somebody else has started it."""
        self._why_killed = reason
        self._process.end(0)

    def close(self) -> None:
        """End everything, and wait until the process is gone. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._channel.close_sending()
            if isinstance(self._process, ChildProcess):  # one that we joined goes on for others
                self._process.end(TIME_TO_EXIT if self._has_closed() else 0)
            self._channel.close()
        self._live.clear()
        self._failure = self._failure or Failed.of(EngineDead("the engine was closed"))

    def _has_closed(self) -> bool:
        """Wait until the process has closed its side; False if it takes longer than it says."""
        until, told = time.monotonic() + TIME_TO_CLOSE, False
        try:
            while self._channel.wait(max(until - time.monotonic(), 0)):
                for message in self._channel.receive(wait=False):
                    if isinstance(message, Closing) and not told:
                        seconds = min(message.seconds, LONGEST_SAVING)
                        until, told = time.monotonic() + seconds + TIME_TO_CLOSE, True
        except EOFError:
            return True
        return False

    def _start(self, config: EngineConfig, door: int | None) -> Ready:
        level = logging.getLogger("paged").getEffectiveLevel()
        self._channel.send(Start(config, level, current_model(), door, current_format()))
        while self._ready is None:
            self._receive()
            self._check_alive()
        return self._ready

    def _send(self, message: Add | Abort | ResetPrefixCache | Look) -> None:
        self._num_sent += 1
        self._channel.send(message)
        self._channel.flush()  # waits for a step at most: the process reads between steps

    def _receive(self) -> None:
        """Wait until something comes, and file it."""
        try:
            messages = self._channel.receive(wait=True)
        except EOFError:
            self._failure = Failed.of(EngineDead(self._why_killed or self._process.how_it_ended()))
            return
        for message in messages:
            match message:
                case News():
                    self._news.append(message)
                case WasReset():
                    self._answers.append(message.done)
                case Looked():
                    self._viewers.popleft()(message.state)
                case Loading():
                    report(Report(message.label, message.unit, message.done, message.total))
                case Ready():
                    self._ready = message
                case Failed():
                    self._failure = message

    def _expected(self, news: News) -> Iterator[SequenceOutput]:
        """What is still waited for. An aborted request's id may live again, as another request."""
        self._stats = news.stats
        for item in news.outputs:
            live = self._live.get(item.request_id)
            if live is None or live.number > news.num_taken or item.index not in live.indices:
                continue
            if item.finish_reason is not None:
                self._forget(item.request_id, item.index)
            yield item

    def _end_all(self, error: str) -> list[SequenceOutput]:
        left = [(name, index) for name, live in self._live.items() for index in live.indices]
        return [self._end(*each, "error", error) for each in sorted(left)]

    def _end(
        self, request_id: str, index: int, reason: str, error: str | None = None
    ) -> SequenceOutput:
        self._forget(request_id, index)
        return SequenceOutput(request_id, index, [], finish_reason=reason, error=error)

    def _forget(self, request_id: str, index: int) -> None:
        indices = self._live[request_id].indices
        indices.remove(index)
        if not indices:
            del self._live[request_id]

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure.error()


_REQUEST = msgspec.msgpack.Decoder(EngineRequest)


def _check_types(request: EngineRequest) -> None:
    """Nothing that the process could not read may be sent. The front has checked the prompt."""
    try:
        _REQUEST.decode(msgspec.msgpack.encode(replace(request, prompt_token_ids=[])))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"a value of the wrong type or size: {error}") from error
