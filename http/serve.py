"""`paged serve`: engines, the application in front of them, and their life from bind to drain."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from paged.http.api.service import Models
from paged.http.app import create_server
from paged.http.connection import Connection
from paged.http.engine import AnyEngine
from paged.http.entries import read_entries
from paged.http.listener import bound, where
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


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit status, 1 if an engine died."""
    options = _with_key(read_flags(ServeOptions, args))
    entries = read_entries(args)
    configure_logging(options.uvicorn_log_level)
    _note_ignored(args)
    _allow_many_connections()
    _check_certificates(options)
    # Before a model is loaded: minutes later is late to hear that the port is taken.
    with bound(options) as listener, running(entries, options) as services:
        app = create_server(
            services,
            api_keys=options.api_key,
            max_body_size=options.max_body_size,
            tells_tokenizer=options.enable_tokenizer_info_endpoint,
            allowed_origins=options.allowed_origins,
            allowed_methods=options.allowed_methods,
            allowed_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
        )
        return serve(app, listener, options)


def _allow_many_connections() -> None:
    """Each takes a file descriptor, of which many systems give 1,024 unless they are asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _with_key(options: ServeOptions) -> ServeOptions:
    """Options with the key in the environment, unless they have keys of their own."""
    keys = options.api_key or tuple(filter(None, [os.getenv("PAGED_API_KEY")]))
    return replace(options, api_key=keys)


def serve(app: Starlette, listener: socket.socket, options: ServeOptions) -> int:
    """Run the application on a bound socket; returns the exit status."""
    if options.disable_access_log_for_endpoints:
        leave_out(options.disable_access_log_for_endpoints)
    config = server_config(app, options)
    server = _Server(config, app, options)
    # A walk over all that start-up made would stop every stream for tenths of a second.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(server, listener))


def server_config(app: Starlette, options: ServeOptions) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=int(options.shutdown_timeout) + _LAST_WORDS,
        lifespan="off",
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=_whose_certificate(options),
    )


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
        names = ", ".join(service.model_name for service in self.models)
        sys.stdout.write(f"Ready: {names} at {where(sockets[0], self.options)}\n")
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


def _whose_certificate(options: ServeOptions) -> ssl.VerifyMode:
    """Clients need a certificate where there is someone to vouch for it."""
    return ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE


def _check_certificates(options: ServeOptions) -> None:
    """Read them once, long before uvicorn does."""
    if options.ssl_certfile is None:
        return
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.ssl_ca_certs)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:  # an SSLError is one
        files = (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
        named = ", ".join(filter(None, files))
        raise ConfigError(f"Cannot use the certificates in {named}: {error}") from error


def _note_ignored(args: argparse.Namespace) -> None:
    if args.disable_log_requests:
        logger.warning("--disable-log-requests has no effect: requests are not logged by default")
