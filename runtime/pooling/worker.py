"""The thread that computes what waits, one batch after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from paged.runtime.errors import EngineDead
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

    def launch(self, batch: Batch) -> Launched: ...
    def close(self) -> None: ...


@dataclass
class _Counts:
    """What statistics tell: texts that run, and counters of batches and of tokens."""

    running: int = 0
    steps: int = 0
    tokens: int = 0


class _InFlight(NamedTuple):
    batch: Batch
    launched: Launched


class Worker:
    """Drives a runner until it is shut down or the runner fails, then closes it.

    The next batch is launched before the one before it is read, so that the device never waits.

    Attributes:
        dead_error: what it died of; None while it lives and after a shutdown.
    """

    def __init__(self, runner: Runner, grid: Grid) -> None:
        self.dead_error: EngineDead | None = None
        self._runner = runner
        self._waiting = Waiting(grid)
        self._live: set[Request[Any]] = set()
        self._in_flight: deque[_InFlight] = deque()
        self._counts = _Counts()
        # Set once, after which nothing is taken. The lock is reentrant because the garbage
        # collector may call `shutdown` anywhere.
        self._closed: str | None = None
        self._changed = threading.Condition(threading.RLock())
        run = partial(copy_context().run, self._run)  # log lines there are about the same model
        self._thread = threading.Thread(target=run, name="paged-pooling", daemon=True)
        self._thread.start()

    def submit[T](
        self,
        texts: Sequence[Tokens],
        finish: Callable[[Vectors], T],
        advance: Advance = lambda number: None,
    ) -> Future[T]:
        """Have texts computed, at least one; see `Request`. Cancelling the future ends it.

        Raises:
            EngineDead: it was shut down or has died.
        """
        request: Request[T] = Request(texts, finish, advance)
        with self._changed:
            if self._closed is not None:
                raise EngineDead(self._closed)
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
        )

    def die(self, cause: str) -> None:
        """End as if a step had failed; does nothing after a death or a shutdown."""
        with self._changed:
            if self._closed is None:
                logger.error("The engine stopped: %s", cause)
                self.dead_error, self._closed = EngineDead(cause), cause
                self._changed.notify()

    def shutdown(self) -> None:
        """End every request with EngineDead, close the runner and wait for both. Idempotent."""
        with self._changed:
            self._closed = self._closed or _SHUT_DOWN
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            while self._closed is None:
                self._step()
        except Exception as error:
            logger.exception("The engine stopped after an error in a step")
            cause = f"the engine stopped after an error in a step: {type(error).__name__}: {error}"
            self.dead_error = EngineDead(cause)
            self._closed = cause
        self._end_all()
        self._runner.close()

    def _step(self) -> None:
        """Launch what waits, then read what was launched before it; sleep if there is neither."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._in_flight or len(self._waiting))
            batch = self._waiting.take() if self._closed is None else None
        if batch is not None:
            self._launch(batch)
        if self._in_flight and (batch is None or len(self._in_flight) > 1):
            self._read(*self._in_flight.popleft())

    def _launch(self, batch: Batch) -> None:
        self._in_flight.append(_InFlight(batch, self._runner.launch(batch)))
        self._counts.running += len(batch.texts)
        self._counts.steps += 1
        self._counts.tokens += sum(len(text.tokens.token_ids) for text in batch.texts)

    def _read(self, batch: Batch, launched: Launched) -> None:
        vectors = launched.read()
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
