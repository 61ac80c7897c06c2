"""The thread that computes what waits, one batch after the other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from paged.runtime.ending import await_end
from paged.runtime.errors import EngineDead, Overloaded
from paged.runtime.gate import DrainRate
from paged.runtime.messages import EngineStats
from paged.runtime.pooling.grid import Grid
from paged.runtime.pooling.reader import Tokens
from paged.runtime.pooling.vectors import Vectors
from paged.runtime.pooling.waiting import Advance, Batch, Request, Waiting

logger = logging.getLogger(__name__)

_SHUT_DOWN = "the engine was shut down"


class Launched(Protocol):
    """A batch that is on its way."""

    def read(self) -> Vectors:
        """Wait for the vectors [rows, N]. Raises what the device raised."""


class Runner(Protocol):
    """The device. Only the worker's thread calls its methods."""

    @property
    def num_compiles(self) -> int:
        """Programs compiled since it was made; 0 unless something is wrong."""

    def watch(self, when_gone: Callable[[str], object]) -> None:
        """Have it said when its process has ended, if it has one, and how."""

    def launch(self, batch: Batch) -> Launched: ...
    def kill(self, reason: str) -> None:
        """Die, even in the middle of a batch, if that can be done; called from any thread."""

    def close(self) -> None: ...


@dataclass
class _Counts:
    """What statistics tell: texts that run, and counters of batches and of tokens."""

    running: int = 0
    steps: int = 0
    tokens: int = 0
    refused: int = 0


class _InFlight(NamedTuple):
    batch: Batch
    launched: Launched


class Worker:
    """Drives a runner until it is shut down or the runner fails, then closes it.

    The next batch is launched before the one before it is read, so that the device never waits.

    Args:
        max_waiting: texts that may wait; a request that finds none waiting is taken in any case.
        max_waiting_tokens: their tokens.

    Attributes:
        dead_error: what it died of; None while it lives and after a shutdown.
    """

    def __init__(
        self,
        runner: Runner,
        grid: Grid,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
    ) -> None:
        self.dead_error: EngineDead | None = None
        self._max_waiting, self._max_waiting_tokens = max_waiting, max_waiting_tokens
        self._rate, self._last_read = DrainRate(), 0.0
        self._last_news = time.monotonic()
        self._runner = runner
        self._waiting = Waiting(grid)
        self._live: set[Request[Any]] = set()
        self._in_flight: deque[_InFlight] = deque()
        self._counts = _Counts()
        # Set once, after which nothing is taken. The lock is reentrant because the garbage
        # collector may call `shutdown` anywhere.
        self._closed: str | None = None
        self._has_ended = False
        self._changed = threading.Condition(threading.RLock())
        run = partial(copy_context().run, self._run)  # log lines there are about the same model
        self._thread = threading.Thread(target=run, name="paged-pooling", daemon=True)
        self._thread.start()
        runner.watch(self.die)

    @property
    def num_steps(self) -> int:
        return self._counts.steps

    @property
    def silence(self) -> float:
        """Seconds since the last news of a batch, while texts wait for one; else 0."""
        is_busy = self._counts.running or len(self._waiting)
        return time.monotonic() - self._last_news if is_busy else 0.0

    def check_running(self) -> None:
        """Raises EngineDead if it was shut down or has died."""
        if self._closed is not None:
            raise EngineDead(self._closed)

    def kill(self, reason: str) -> None:
        """Have it die, though a batch hangs; see `Runner.kill`."""
        self._runner.kill(reason)

    def submit[T](
        self,
        texts: Sequence[Tokens],
        finish: Callable[[Vectors], T],
        advance: Advance = lambda number: None,
    ) -> Future[T]:
        """Have texts computed, at least one; see `Request`. Cancelling the future ends it.

        Raises:
            EngineDead: it was shut down or has died.
            Overloaded: too much waits.
        """
        request: Request[T] = Request(texts, finish, advance)
        with self._changed:
            self.check_running()
            self._check_room(texts)
            if not self.silence:
                self._last_news = time.monotonic()
            self._live.add(request)
            self._waiting.add(request)
            self._changed.notify()
        request.future.add_done_callback(lambda future: self._live.discard(request))
        return request.future

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._counts.running,
            num_waiting=len(self._waiting),
            prompt_tokens=self._counts.tokens,
            prompt_tokens_admitted=self._counts.tokens,
            num_steps=self._counts.steps,
            compiles_after_warmup=self._runner.num_compiles,
            room=self._room,
            retry_after=max(self._wait, 1.0),
            wait_seconds=self._wait,
            waiting_tokens=self._waiting.num_tokens,
            refused={"queue": self._counts.refused},
        )

    @property
    def _room(self) -> int | None:
        """Texts that would be taken now; None for any number."""
        most_tokens = self._max_waiting_tokens
        if most_tokens is not None and self._waiting.num_tokens >= most_tokens:
            return 0
        if self._max_waiting is None:
            return None
        return max(self._max_waiting - len(self._waiting), 0)

    @property
    def _wait(self) -> float:
        return self._rate.seconds_for(self._waiting.num_tokens)

    def _check_room(self, texts: Sequence[Tokens]) -> None:
        room, num_waiting = self._room, len(self._waiting)
        if room is not None and num_waiting and len(texts) > room:
            self._counts.refused += 1
            message = f"The queue is full: {num_waiting} texts wait"
            raise Overloaded(message, "queue", max(self._wait, 1.0))

    def die(self, cause: str) -> None:
        """End as if a step had failed; does nothing after a death or a shutdown."""
        with self._changed:
            if self._closed is None:
                logger.error("The engine stopped: %s", cause)
                self.dead_error, self._closed = EngineDead(cause), cause
                self._changed.notify()

    def shutdown(self) -> None:
        """End every request with EngineDead, close the runner and wait for both. Idempotent.

        A batch that hangs is not waited for.
        """
        with self._changed:
            self._closed = self._closed or _SHUT_DOWN
            self._changed.notify()
        await_end(self._thread, lambda: not self._has_ended, self._runner.kill)

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            while self._closed is None:
                self._step()
        except Exception as error:
            self._fail(error)
        self._end_all()
        self._has_ended = True
        self._runner.close()

    def _fail(self, error: Exception) -> None:
        if self._closed is not None:  # a process that is known to be gone
            return
        logger.exception("The engine stopped after an error in a step")
        cause = f"the engine stopped after an error in a step: {type(error).__name__}: {error}"
        self.dead_error, self._closed = EngineDead(cause), cause

    def _step(self) -> None:
        """Launch what waits, then read what was launched before it; sleep if there is neither."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._in_flight or len(self._waiting))
            batch = self._waiting.take() if self._closed is None else None
        if batch is not None:
            if not self._in_flight:
                self._last_read = time.monotonic()
            self._launch(batch)
        if self._in_flight and (batch is None or len(self._in_flight) > 1):
            self._read(*self._in_flight.popleft())

    def _launch(self, batch: Batch) -> None:
        self._counts.running += len(batch.texts)
        self._in_flight.append(_InFlight(batch, self._runner.launch(batch)))
        self._counts.steps += 1
        self._counts.tokens += sum(len(text.tokens.token_ids) for text in batch.texts)

    def _read(self, batch: Batch, launched: Launched) -> None:
        vectors = launched.read()
        now = time.monotonic()
        if len(self._waiting):
            num_tokens = sum(len(text.tokens.token_ids) for text in batch.texts)
            self._rate.observe(num_tokens, now - self._last_read)
        self._last_read = self._last_news = now
        self._counts.running -= len(batch.texts)
        for text, vector in zip(batch.texts, vectors, strict=False):  # rows may be empty
            text.request.deliver(text.place, vector)

    def _end_all(self) -> None:
        assert self._closed is not None, "what ends here is not followed by more"
        with self._changed:
            live, self._waiting = list(self._live), Waiting(self._waiting.grid)
        self._in_flight.clear()
        self._counts.running = 0
        for request in live:
            request.fail(EngineDead(self._closed))
