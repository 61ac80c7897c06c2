"""`paged serve`: engines, the application in front of them, and their life from bind to drain."""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import logging
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from paged.http.api.service import Models
from paged.http.app import create_server
from paged.http.engine import AnyEngine
from paged.http.entries import read_entries
from paged.http.logs import configure_logging, leave_out, log_stats
from paged.http.options import ServeOptions
from paged.http.start import running
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags

logger = logging.getLogger(__name__)

# Proxies keep idle connections for 60 s; the one who closes first must not be the server.
_KEEP_ALIVE = 75
# What aborted requests get to say so before their connections are cut.
_LAST_WORDS = 5
_WATCH_INTERVAL = 1.0
# Addresses that stand for all of a machine's, and the one by which it finds itself there.
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit status, 1 if an engine died."""
    options = _with_key(read_flags(ServeOptions, args))
    entries = read_entries(args)
    configure_logging(options.uvicorn_log_level)
    _note_ignored(args)
    # Before a model is loaded: minutes later is late to hear that the port is taken.
    with _bind(options.host, options.port) as listener, running(entries, options) as services:
        app = create_server(
            services,
            api_keys=options.api_key,
            max_body_size=options.max_body_size,
            allowed_origins=options.allowed_origins,
            allowed_methods=options.allowed_methods,
            allowed_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
        )
        return serve(app, listener, options)


def _with_key(options: ServeOptions) -> ServeOptions:
    """Options with the key in the environment, unless they have keys of their own."""
    keys = options.api_key or tuple(filter(None, [os.getenv("PAGED_API_KEY")]))
    return replace(options, api_key=keys)


def serve(app: Starlette, listener: socket.socket, options: ServeOptions) -> int:
    """Run the application on a bound socket; returns the exit status."""
    if options.disable_access_log_for_endpoints:
        leave_out(options.disable_access_log_for_endpoints)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=int(options.shutdown_timeout) + _LAST_WORDS,
        lifespan="off",
    )
    server = _Server(config, app, options)
    # A walk over all that start-up made would stop every stream for tenths of a second.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(server, listener))


async def _serve(server: _Server, listener: socket.socket) -> int:
    watchers = [asyncio.create_task(_stop_when_dead(server))]
    if not server.options.disable_log_stats:
        watchers += [asyncio.create_task(log_stats(*each)) for each in _logged(server.models)]
    try:
        await server.serve(sockets=[listener])
    finally:
        for watcher in watchers:
            watcher.cancel()
    return 1 if _dead(server.models) else 0


def _logged(models: Models) -> Iterator[tuple[AnyEngine, str]]:
    """Engines with what their lines call them: numbers, and names where there are several."""
    for number, service in enumerate(models):
        name = f" ({service.model_name})" if len(models.services) > 1 else ""
        yield service.engine, f"{number:03}{name}"


def _dead(models: Models) -> list[str]:
    """Models whose engine has died."""
    return [service.model_name for service in models if service.engine.errored]


async def _stop_when_dead(server: _Server) -> None:
    """A dead engine does not come back: leave, so that a supervisor starts another process."""
    while not (dead := _dead(server.models)):
        await asyncio.sleep(_WATCH_INTERVAL)
    logger.critical("The engine of %s has stopped; shutting down", ", ".join(dead))
    server.should_exit = True


class _Server(uvicorn.Server):
    """Drains on the first signal, leaves on the second.

    Draining: no new connections; running requests finish, or are aborted when their time is up.
    """

    def __init__(self, config: uvicorn.Config, app: Starlette, options: ServeOptions) -> None:
        super().__init__(config)
        self.models: Models = app.state.models
        self.options = options

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGINT and SIGTERM."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        where = f"{_url(sockets[0])}/v1{_who_else(sockets[0], has_keys=bool(self.options.api_key))}"
        names = ", ".join(service.model_name for service in self.models)
        sys.stdout.write(f"Ready: {names} at {where}\n")
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if num_running := sum(service.num_running for service in self.models):
            logger.info(
                "Finishing running requests (%d), for %g s at most; a second signal does not wait",
                num_running,
                self.options.shutdown_timeout,
            )
        deadline = asyncio.create_task(self._abort_in_time())
        await super().shutdown(sockets)
        deadline.cancel()

    async def _abort_in_time(self) -> None:
        await asyncio.sleep(self.options.shutdown_timeout)
        await asyncio.gather(*(service.abort_running() for service in self.models))


def _bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet: until the server is ready, connections are refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        advice = ": it is taken, use another --port" if taken else f": {error}"
        raise ConfigError(f"Cannot listen on {host} port {port}{advice}") from error
    return listener


def _url(listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    host = _EVERY_INTERFACE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _who_else(listener: socket.socket, *, has_keys: bool) -> str:
    """A remark on who can reach the server, "" where it is whom the address says."""
    if listener.getsockname()[0] not in _EVERY_INTERFACE:
        return ""
    if has_keys:
        return " (on every interface)"
    return " (on every interface, no API key; --host 127.0.0.1 for this machine only)"


def _note_ignored(args: argparse.Namespace) -> None:
    if args.disable_log_requests:
        logger.warning("--disable-log-requests has no effect: requests are not logged by default")
