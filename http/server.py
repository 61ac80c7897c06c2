"""The HTTP server of one process, from its first connection to its last."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from paged.http.api.service import Models
from paged.http.api_processes import ApiProcesses, IsReady
from paged.http.app import told
from paged.http.engine import AnyEngine
from paged.http.gate import Gate
from paged.http.listener import where
from paged.http.logs import log_stats
from paged.http.options import ServeOptions
from paged.http.peers import answering
from paged.models.reports import reports_to
from paged.runtime.ending import TIME_TO_END
from paged.runtime.wire import Channel

logger = logging.getLogger(__name__)

LAST_WORDS = 5
"""Seconds that aborted requests get to say so before their connections are cut."""

_WATCH_INTERVAL = 1.0
_DRAIN_INTERVAL = 0.05
# Seconds in which an engine that does not hang has aborted its requests.
_ABORT_TIMEOUT = 2.0

TIME_FOR_OTHERS = _ABORT_TIMEOUT + LAST_WORDS + 1
"""Seconds after --shutdown-timeout in which the other API processes are gone."""

TIME_TO_LEAVE = TIME_FOR_OTHERS + TIME_TO_END + 1
"""Seconds after --shutdown-timeout in which a server is gone, whatever hangs. Where engines write
pages to disk, `LONGEST_SAVING` comes on top."""

_FINISHING = "Finishing running requests (%d), for %g s at most; a second signal does not wait"


@dataclass(frozen=True)
class Opened:
    """What a server serves, once its models are loaded.

    Attributes:
        private: where other API processes ask this one; None without any.
        others: they, if this is the first.
        seconds_to_save: that its engines may take in the end to write pages to disk.
    """

    app: Starlette
    private: socket.socket | None = None
    others: ApiProcesses | None = None
    seconds_to_save: float = 0.0

    @property
    def models(self) -> Models:
        models: Models = self.app.state.models
        return models


class Opening:
    """The loading of the models, in a thread: the server answers meanwhile.

    Args:
        load: gives what is served, and leaves what ends it on a stack.
        gate: is told how it gets on.
    """

    def __init__(self, load: Callable[[ExitStack], Opened], gate: Gate) -> None:
        self.opened: Future[Opened] = Future()
        self._stack = ExitStack()

        def run() -> None:
            try:
                with reports_to(gate.progress.take):
                    self.opened.set_result(load(self._stack))
            except BaseException as error:
                self.opened.set_exception(error)

        # A daemon: nothing stops a thread that loads, and the process must not wait for it.
        threading.Thread(target=run, name="paged-opening", daemon=True).start()

    def close(self) -> None:
        """End what it has started so far."""
        self._stack.close()


class Server(uvicorn.Server):
    """Answers from the start, drains on the first signal, leaves on the second.

    Draining: requests that run finish, or are aborted when their time is up; new ones are refused.
    A signal while the models are loaded ends it at once. Every wait on the way out is bounded, and
    so is their sum, by a timer that ends the process.

    Attributes:
        failure: what the models could not be loaded for; None if they could.
        status: the exit status.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gate: Gate,
        options: ServeOptions,
        listener: socket.socket,
        first: Channel | None = None,
    ) -> None:
        super().__init__(config)
        self.failure: BaseException | None = None
        self.status = 0
        self._gate, self._options, self._first = gate, options, first
        self._listener = listener
        self._opened: Opened | None = None
        self._has_had_signal = self._is_leaving = False
        self._timer: threading.Timer | None = None  # from the order to leave on
        self._tasks: set[asyncio.Task[None]] = set()

    async def run_with(self, opening: Opening) -> None:
        """Serve what the opening brings until a signal, or the end of an engine."""
        self._loop = asyncio.get_running_loop()
        if self._options.api_keys_file is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self._read_keys_again)
        async with AsyncExitStack() as stack:
            self._begin(self._arrive(opening, stack))
            await self.serve(sockets=[self._listener])
            for task in self._tasks:
                task.cancel()
        if self._opened is not None and self._opened.models.dead():
            self.status = 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGINT and SIGTERM."""
        if self._has_had_signal:
            os._exit(128 + sig)
        self._has_had_signal = True
        self._loop.call_soon_threadsafe(self._stop)

    def _read_keys_again(self) -> None:
        """The handler of SIGHUP. While models are loaded nobody has read them yet."""
        if self._opened is not None:
            self._opened.app.state.key_ring.reload()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._first is not None:
            self._loop.add_reader(self._first.fileno(), self._first_has_left)

    async def _arrive(self, opening: Opening, stack: AsyncExitStack) -> None:
        """Wait for the models, and let requests through."""
        try:
            # Shielded: a server that stops meanwhile must not make the loading look ended.
            opened = await asyncio.shield(asyncio.wrap_future(opening.opened))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # An interrupt too: what leaves a task would stop the loop before its doors are closed.
            self.failure, self.should_exit = error, True
            return
        if opened.private is not None:
            await stack.enter_async_context(answering(opened.private, told(opened.app)))
        self._opened = opened
        self._gate.open(opened.app)
        self._begin(self._stop_when_dead(opened))
        if self._first is not None:
            self._first.send(IsReady())
            return
        if not self._options.disable_log_stats:
            for each in named_engines(opened.models):
                self._begin(log_stats(*each))
        names = ", ".join(service.model_name for service in opened.models)
        sys.stdout.write(f"Ready: {names} at {where(self._listener, self._options)}\n")
        sys.stdout.flush()

    def _first_has_left(self) -> None:
        """The first API process says that it is time, or is gone."""
        assert self._first is not None
        self._loop.remove_reader(self._first.fileno())
        self._stop()

    def _stop(self) -> None:
        if self._opened is None:
            self._leave_in(TIME_TO_LEAVE)
            self.should_exit = True
        else:
            self._begin(self._drain(self._opened))

    def _leave_in(self, seconds: float) -> None:
        """See to it that the process has ended by then."""

        def leave() -> None:
            logger.critical("The server has not come to its end in %g s: leaving as it is", seconds)
            os._exit(self.status)

        self._timer = threading.Timer(seconds, leave)
        self._timer.daemon = True
        self._timer.start()

    def has_left(self) -> None:
        """Nothing is waited for any more, and so the process need not be ended."""
        if self._timer is not None:
            self._timer.cancel()

    async def _drain(self, opened: Opened) -> None:
        """Let requests finish, and leave. Does nothing the second time."""
        if self._is_leaving:
            return
        self._is_leaving = self._gate.is_draining = True
        most = self._options.shutdown_timeout + TIME_TO_LEAVE + opened.seconds_to_save
        self._leave_in(most)
        if opened.others is not None:
            opened.others.finish()
        load, seconds = opened.app.state.load, self._options.shutdown_timeout
        if load.num_requests:
            logger.info(_FINISHING, load.num_requests, seconds)
        end = self._loop.time() + seconds
        while load.num_requests and self._loop.time() < end:
            await asyncio.sleep(_DRAIN_INTERVAL)
        if load.num_requests:
            with suppress(TimeoutError):  # an engine that hangs aborts none
                async with asyncio.timeout(_ABORT_TIMEOUT):
                    await asyncio.gather(*(service.abort_running() for service in opened.models))
        self.should_exit = True

    async def _stop_when_dead(self, opened: Opened) -> None:
        """A dead engine does not come back: leave, so that a supervisor starts another process."""
        while not (what := self._what_has_stopped(opened)):
            await asyncio.sleep(_WATCH_INTERVAL)
        self.status = 1
        logger.critical("%s has stopped; shutting down", what)
        await self._drain(opened)  # what other engines have begun

    def _what_has_stopped(self, opened: Opened) -> str | None:
        """An engine, or an API process before its time; None if nothing has."""
        if dead := opened.models.dead():
            return f"The engine of {', '.join(dead)}"
        others_run = opened.others is None or self._is_leaving or opened.others.are_running
        return None if others_run else "An API process"

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def named_engines(models: Models) -> Iterator[tuple[AnyEngine, str]]:
    """Engines with what their lines call them: numbers, and names where there are several."""
    for number, service in enumerate(models):
        name = f" ({service.model_name})" if len(models.services) > 1 else ""
        yield service.engine, f"{number:03}{name}"
