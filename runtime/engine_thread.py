"""An engine in a thread of its own, and the streams that bring its outputs to event loops.

The thread alone touches the engine. Others hand it calls through an inbox; it makes them between
steps, and sleeps when there is neither a call nor work. The outputs of a step reach an event loop
in one piece.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue

from msgspec.structs import replace

from paged.runtime.ending import await_end
from paged.runtime.engine import Engine
from paged.runtime.engine_state import EngineState
from paged.runtime.errors import EngineDead
from paged.runtime.front import Prepared
from paged.runtime.outputs import RequestOutput, join_deltas
from paged.runtime.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)

_SHUT_DOWN = "the engine was shut down"


class Stream:
    """Outputs of a request on their way to its consumer. Lives on the consumer's event loop.

    A slow consumer finds what came meanwhile as one output: DELTA outputs joined, else the newest.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.request_id = prepared.request.request_id
        self.loop = asyncio.get_running_loop()
        self._joins = prepared.request.params.output_kind is RequestOutputKind.DELTA
        self._wanted: asyncio.Future[None] | None = None  # while the consumer waits
        self._waiting: RequestOutput | None = None
        self._error: Exception | None = None

    async def get(self) -> RequestOutput:
        """The next output; after the last one, raises the error that ended the stream early."""
        if self._waiting is None and self._error is None:
            self._wanted = self.loop.create_future()
            await self._wanted
        output, self._waiting = self._waiting, None
        if output is None:
            assert self._error is not None, "an output or an error ends the wait"
            raise self._error
        return output

    def put(self, item: RequestOutput | Exception) -> None:
        if isinstance(item, Exception):
            self._error = item
        elif self._waiting is not None and self._joins:
            self._waiting = join_deltas(self._waiting, item)
        else:
            self._waiting = item
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


_Delivery = tuple[Stream, RequestOutput | Exception]


class EngineThread:
    """Drives an engine until it is shut down or dies, then closes it.

    Attributes:
        stats: as of the last step.
        dead_error: what the engine died of; None while it lives and after a shutdown.
        front: the engine's.
    """

    def __init__(self, engine: Engine) -> None:
        self.stats = engine.stats()
        self.dead_error: EngineDead | None = None
        self.front = engine.front
        self._last_news = time.monotonic()
        self._engine = engine
        self._streams: dict[str, Stream] = {}
        self._looks: set[Future[EngineState]] = set()  # that the engine has yet to take
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # rung after each call put in
        # Set once, after which the inbox takes nothing. The lock is reentrant because the garbage
        # collector may call `shutdown` anywhere.
        self._closed: str | None = None
        self._gate = threading.RLock()
        self._is_told_to_end = self._stopping = False
        run = partial(copy_context().run, self._run)  # log lines there are about the same model
        self._thread = threading.Thread(target=run, name="paged-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._closed is None

    @property
    def num_steps(self) -> int:
        return self.stats.num_steps

    @property
    def silence(self) -> float:
        """Seconds since the last news of a step, while requests wait for one, whosever; else 0."""
        is_busy = self._streams or self.stats.num_running or self.stats.num_waiting
        return time.monotonic() - self._last_news if is_busy else 0.0

    def kill(self, reason: str) -> None:
        """Have the engine die, though it hangs; see `RemoteCore.kill`."""
        self._engine.kill(reason)

    def check_running(self) -> None:
        """Raises EngineDead if the engine was shut down or has died."""
        if self._closed is not None:
            raise EngineDead(self._closed)

    def start(self, stream: Stream) -> None:
        """Start the request of a stream. What is wrong with it comes through the stream."""
        self._submit(partial(self._start, stream))

    def leave(self, stream: Stream) -> None:
        """Nobody reads this stream any more: abort its request if it still runs."""
        with suppress(EngineDead):
            self._submit(partial(self._leave, stream))

    def abort(self, request_id: str) -> Future[None]:
        """End a request; its stream gets a last output."""
        return self.call(lambda engine: self._deliver(engine.abort([request_id])))

    def call[T](self, function: Callable[[Engine], T]) -> Future[T]:
        """Have a function called with the engine between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._submit(run)
        return future

    def look(self) -> Future[EngineState]:
        """A close look at the engine, between two steps; EngineDead if it does not come to that."""
        found: Future[EngineState] = Future()
        found.set_running_or_notify_cancel()  # whoever waits may leave; the engine must not notice
        self._submit(partial(self._look, found))
        return found

    def shutdown(self) -> None:
        """End every request with "abort", close the engine and wait for both. Idempotent.

        A step that hangs is not waited for.
        """
        self._is_told_to_end = True
        with suppress(EngineDead):
            self._submit(self._stop)
        await_end(self._thread, lambda: self.is_running, self.kill)

    def _submit(self, call: Callable[[], None]) -> None:
        with self._gate:
            self.check_running()
            self._inbox.put(call)
            os.eventfd_write(self._bell, 1)

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            self._serve()
        except EngineDead as error:
            if not self._is_told_to_end:  # else it was not to live on
                self.dead_error = error
        except Exception as error:
            logger.exception("The engine's thread failed")
            self.dead_error = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
        self._close(_SHUT_DOWN if self.dead_error is None else str(self.dead_error))

    def _serve(self) -> None:
        engine = self._engine
        awaited = select.poll()
        for descriptor in (self._bell, engine.fileno()):
            if descriptor is not None:
                awaited.register(descriptor, select.POLLIN)
        while not self._stopping:
            if not engine.has_work:
                awaited.poll()
            self._make_calls()
            outputs = []
            if engine.has_work and not self._stopping:
                outputs = engine.step()
                self._last_news = time.monotonic()
            self.stats = engine.stats()
            self._deliver(outputs)
        self._deliver(engine.abort(engine.request_ids))

    def _close(self, reason: str) -> None:
        with self._gate:
            self._closed = reason
        self.stats = replace(self.stats, num_running=0, num_waiting=0, kv_cache_usage=0)
        self._make_calls()
        os.close(self._bell)
        self._send((stream, EngineDead(reason)) for stream in self._streams.values())
        self._streams.clear()
        for found in list(self._looks):
            found.set_exception(EngineDead(reason))
        self._engine.close()

    def _make_calls(self) -> None:
        """Make the calls in the inbox. The bell is stilled first: a call put in later rings it."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()

    def _start(self, stream: Stream) -> None:
        try:
            self.check_running()
            self._engine.add(stream.prepared)
        except Exception as error:  # whatever is wrong with one request ends that one alone
            self._send([(stream, error)])
        else:
            if not self.silence:
                self._last_news = time.monotonic()
            self._streams[stream.request_id] = stream

    def _look(self, found: Future[EngineState]) -> None:
        self._looks.add(found)
        found.add_done_callback(self._looks.discard)
        try:
            self._engine.look(found.set_result)
        except EngineDead as error:
            found.set_exception(error)

    def _leave(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort([stream.request_id])

    def _stop(self) -> None:
        self._stopping = True

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        deliveries: list[_Delivery] = []
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is not None:
                deliveries.append((stream, output))
                if output.finished:
                    del streams[output.request_id]
        self._send(deliveries)

    def _send(self, deliveries: Iterable[_Delivery]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = defaultdict(list)
        for delivery in deliveries:
            by_loop[delivery[0].loop].append(delivery)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop was closed, and its consumers are gone
                for stream, _ in batch:
                    self._leave(stream)


def _put_all(batch: list[_Delivery]) -> None:
    for stream, item in batch:
        stream.put(item)
