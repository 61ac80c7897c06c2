"""One replica: a server's models and its application, without its sockets. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message

from paged.http.api.service import Models
from paged.http.cli import parse_serve
from paged.http.entries import read_entries
from paged.http.logs import configure_logging, log_stats
from paged.http.options import ServeOptions
from paged.http.replicas.joined import Whole
from paged.http.replicas.relay import Messages
from paged.http.replicas.request import Asked
from paged.http.serve import make_app, settled, with_key
from paged.http.server import named_engines
from paged.http.start import running
from paged.runtime.errors import EngineDead
from paged.runtime.flags import read_flags

logger = logging.getLogger(__name__)


class Replica:
    """What a process of Ray holds. Its methods are called on one event loop.

    Args:
        flags: of `paged serve`.
        name: of this replica among all.
    """

    def __init__(self, flags: Sequence[str], name: str = "") -> None:
        self._name = name
        args = parse_serve(flags)
        options = with_key(read_flags(ServeOptions, args))
        configure_logging(options.uvicorn_log_level, options.log_format)
        self._stack = ExitStack()
        self._app = settled(partial(_load, args, options), self._stack)
        self._logs_stats = not options.disable_log_stats
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def models(self) -> Models:
        models: Models = self._app.state.models
        return models

    async def answer(self, request: Asked) -> Messages:
        """The reply to a request, as it comes. Closing it early ends the request."""
        async with aclosing(replies(self._app, request)) as pieces:
            async for messages in pieces:
                yield messages

    async def answer_whole(self, request: Asked) -> Whole:
        """The reply to a request that all replicas get."""
        found = [message async for piece in self.answer(request) for message in piece]
        body = b"".join(message.get("body", b"") for message in found[1:])
        return Whole(self._name, found[0]["status"], found[0]["headers"], body)

    async def check_health(self) -> None:
        """Raise EngineDead for an engine that does not come back; others are started again here."""
        if self._logs_stats and not self._tasks:
            logged = named_engines(self.models)
            self._tasks = [asyncio.create_task(log_stats(*each)) for each in logged]
        if dead := self.models.dead():
            raise EngineDead(f"The engine of {', '.join(dead)} has stopped")

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers want to know: how many tokens the pages of prefixes can hold."""
        stats = [service.engine.stats() for service in self.models]
        pages = (each.page_size * (each.num_pages + each.num_host_pages) for each in stats)
        return {"num_tokens": sum(pages)}

    def close(self) -> None:
        """End the engines. Idempotent."""
        self._stack.close()


def _load(args: Any, options: ServeOptions, stack: ExitStack) -> Starlette:
    services = stack.enter_context(running(read_entries(args), options))
    return make_app(services, options, keeps_responses=False)


async def replies(app: ASGIApp, request: Asked) -> Messages:
    """What an application replies, as it comes; closing this early cancels it."""
    queue: asyncio.Queue[Message | None] = asyncio.Queue()
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        # The client cannot be seen from here: whoever can closes this generator.
        return body.pop() if body else await asyncio.get_running_loop().create_future()

    async def answer() -> None:
        try:
            await app(dict(request.scope), receive, queue.put)
        except Exception:  # the client has been told, or notices that the reply is not whole
            logger.exception("%s: a bug", request.scope["path"])
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(answer())
    try:
        while found := await _those_there(queue):
            yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _those_there(queue: asyncio.Queue[Message | None]) -> list[Message]:
    """At least one message; none at the end."""
    found = [await queue.get()]
    while found[-1] is not None and not queue.empty():
        found.append(queue.get_nowait())
    if found[-1] is None and len(found) > 1:
        queue.put_nowait(found.pop())
    return [message for message in found if message is not None]
