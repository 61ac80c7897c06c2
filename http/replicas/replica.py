"""One replica: a server's models and its application, without its sockets. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Send

from paged.http.api.service import Models
from paged.http.cli import parse_serve
from paged.http.entries import read_entries
from paged.http.logs import configure_logging, log_stats
from paged.http.options import ServeOptions
from paged.http.replicas.joined import Whole
from paged.http.replicas.reply_pipes import Address, Pipes
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
        self._name, self._stack = name, ExitStack()
        args = parse_serve(flags)
        options = with_key(read_flags(ServeOptions, args))
        configure_logging(options.uvicorn_log_level, options.log_format)
        self._app = settled(partial(_load, args, options), self._stack)
        self._pipes = Pipes()
        self._logs_stats = not options.disable_log_stats
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def models(self) -> Models:
        models: Models = self._app.state.models
        return models

    async def answer(self, request: Asked, router: Address, number: int) -> None:
        """Send the reply to a router as it comes. Being cancelled ends the request.

        Args:
            number: of the request there.

        Raises:
            OSError: the router cannot be reached, or no more.
        """
        pipe = await self._pipes.to(router)
        await respond(self._app, request, partial(pipe.send, number), pipe.gone)
        pipe.end(number)

    async def answer_whole(self, request: Asked) -> Whole:
        """The reply to a request that all replicas get."""
        found: list[Message] = []

        async def take(message: Message) -> None:
            found.append(message)

        await respond(self._app, request, take)
        body = b"".join(message.get("body", b"") for message in found[1:])
        return Whole(self._name, found[0]["status"], found[0]["headers"], body)

    async def check_health(self) -> None:
        """Raise EngineDead for an engine that does not come back; others are started again here."""
        if self._logs_stats and not self._tasks:
            logged = named_engines(self.models)
            self._tasks = [asyncio.create_task(log_stats(*each)) for each in logged]
        if dead := self.models.dead():
            raise EngineDead(f"The engine of {', '.join(dead)} has stopped")

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers want to know of it: how many tokens its pages can hold."""
        stats = [service.engine.stats() for service in self.models]
        pages = (each.page_size * (each.num_pages + each.num_host_pages) for each in stats)
        return {"num_tokens": sum(pages)}

    def close(self) -> None:
        """End the engines. Idempotent."""
        self._stack.close()


def _load(args: Any, options: ServeOptions, stack: ExitStack) -> Starlette:
    services = stack.enter_context(running(read_entries(args), options))
    return make_app(services, options, keeps_responses=False)


async def respond(
    app: ASGIApp, request: Asked, send: Send, gone: asyncio.Event | None = None
) -> None:
    """Have an application reply. A bug of its own is logged: its client was told, if it could be.

    Args:
        gone: set when nobody reads the reply any more. The client itself cannot be seen from here:
            whoever can cancels this.

    Raises:
        OSError: what `send` raises.
    """
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    try:
        await app(dict(request.scope), receive, send)
    except OSError:
        raise
    except Exception:
        logger.exception("%s: a bug", request.scope["path"])
