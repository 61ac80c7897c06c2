"""`paged serve`: engines, the application in front of them, and their life from bind to drain."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from paged.http.api.service import AnyService, Models
from paged.http.api_processes import ApiProcesses, IsReady
from paged.http.app import create_server, told
from paged.http.connection import Connection
from paged.http.engine import AnyEngine
from paged.http.entries import Entry, read_entries
from paged.http.keys import KeyRing, read_keys
from paged.http.listener import bound, where
from paged.http.logs import configure_logging, leave_out, log_stats
from paged.http.options import ServeOptions
from paged.http.peers import Peers, answering
from paged.http.start import check_all_make_text, running
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.wire import Channel

logger = logging.getLogger(__name__)

# Proxies keep idle connections for 60 s; the one who closes first must not be the server.
_KEEP_ALIVE = 75
# What aborted requests get to say so before their connections are cut.
_LAST_WORDS = 5
_WATCH_INTERVAL = 1.0
# Streams make some objects for each token and nearly none that only the collector would find; by
# Python's own 700 it would look ten times a step.
_OBJECTS_BETWEEN_COLLECTIONS = 20_000


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit status, 1 if an engine died."""
    options = _with_key(read_flags(ServeOptions, args))
    entries = read_entries(args)
    configure_logging(options.uvicorn_log_level, options.log_format)
    _note_ignored(args)
    _allow_many_connections()
    _check_certificates(options)
    if options.api_keys_file is not None:
        read_keys(Path(options.api_keys_file))
    # Before a model is loaded: minutes later is late to hear that the port is taken.
    with bound(options) as listener:
        if options.api_server_count > 1:
            return _run_several(entries, options, listener)
        with running(entries, options) as services:
            return serve(make_app(services, options), listener, options)


def _run_several(entries: Sequence[Entry], options: ServeOptions, listener: socket.socket) -> int:
    """As the first of several API processes."""
    check_all_make_text(entries, options)
    with (
        ApiProcesses(entries, options, listener) as others,
        running(entries, options, others.doors) as services,
    ):
        try:
            others.await_ready()
            app = make_app(services, options, others.peers)
            return serve(app, listener, options, private=others.private, others=others)
        finally:
            others.end(options.shutdown_timeout + _LAST_WORDS)


def make_app(
    services: Sequence[AnyService], options: ServeOptions, peers: Peers | None = None
) -> Starlette:
    """The application that the options describe, one of several if it has peers."""
    return create_server(
        services,
        api_keys=options.api_key,
        admin_keys=options.admin_api_key,
        reads_traces=options.otlp_traces_endpoint is not None,
        key_ring=None if options.api_keys_file is None else KeyRing(Path(options.api_keys_file)),
        max_body_size=options.max_body_size,
        default_timeout=options.default_timeout,
        tells_tokenizer=options.enable_tokenizer_info_endpoint,
        allowed_origins=options.allowed_origins,
        allowed_methods=options.allowed_methods,
        allowed_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        peers=peers or Peers(),
    )


def _allow_many_connections() -> None:
    """Each takes a file descriptor, of which many systems give 1,024 unless they are asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _with_key(options: ServeOptions) -> ServeOptions:
    """Options with the key in the environment, unless they have keys of their own."""
    keys = options.api_key or tuple(filter(None, [os.getenv("PAGED_API_KEY")]))
    return replace(options, api_key=keys)


def serve(
    app: Starlette,
    listener: socket.socket,
    options: ServeOptions,
    *,
    private: socket.socket | None = None,
    others: ApiProcesses | None = None,
    first: Channel | None = None,
) -> int:
    """Run the application on a bound socket; returns the exit status.

    Args:
        private: where other API processes ask.
        others: these processes, for the first of several.
        first: to the first of several, for one of the others.
    """
    if options.disable_access_log_for_endpoints:
        leave_out(options.disable_access_log_for_endpoints)
    config = server_config(app, options)
    server = _Server(config, app, options, others=others, first=first)
    # A walk over all that start-up made would stop every stream for tenths of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])
    asked = nullcontext() if private is None else answering(private, told(app))
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(server, listener, asked))


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


async def _serve(
    server: _Server, listener: socket.socket, asked: AbstractAsyncContextManager[None]
) -> int:
    watchers = [asyncio.create_task(_stop_when_dead(server))]
    if server.key_ring is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.key_ring.reload)
    if not server.options.disable_log_stats and server.first is None:
        watchers += [asyncio.create_task(log_stats(*each)) for each in _logged(server.models)]
    try:
        async with asked:
            await server.serve(sockets=[listener])
    finally:
        for watcher in watchers:
            watcher.cancel()
    return 1 if server.has_failed or server.models.dead() else 0


def _logged(models: Models) -> Iterator[tuple[AnyEngine, str]]:
    """Engines with what their lines call them: numbers, and names where there are several."""
    for number, service in enumerate(models):
        name = f" ({service.model_name})" if len(models.services) > 1 else ""
        yield service.engine, f"{number:03}{name}"


async def _stop_when_dead(server: _Server) -> None:
    """A dead engine does not come back: leave, so that a supervisor starts another process."""
    while not (what := server.what_has_stopped()):
        await asyncio.sleep(_WATCH_INTERVAL)
    server.has_failed = True
    logger.critical("%s has stopped; shutting down", what)
    server.should_exit = True


class _Server(uvicorn.Server):
    """Drains on the first signal, leaves on the second.

    Draining: no new connections; running requests finish, or are aborted when their time is up.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: Starlette,
        options: ServeOptions,
        *,
        others: ApiProcesses | None,
        first: Channel | None,
    ) -> None:
        super().__init__(config)
        self.models: Models = app.state.models
        self.key_ring: KeyRing | None = app.state.key_ring
        self.options = options
        self.has_failed = False
        self.others, self.first = others, first

    def what_has_stopped(self) -> str | None:
        """An engine, or an API process before its time; None if nothing has."""
        if dead := self.models.dead():
            return f"The engine of {', '.join(dead)}"
        others_run = self.others is None or self.should_exit or self.others.are_running
        return None if others_run else "An API process"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGINT and SIGTERM."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        if self.first is not None:
            asyncio.get_running_loop().add_reader(self.first.fileno(), self._finish)
            self.first.send(IsReady())
            return
        names = ", ".join(service.model_name for service in self.models)
        sys.stdout.write(f"Ready: {names} at {where(sockets[0], self.options)}\n")
        sys.stdout.flush()

    def _finish(self) -> None:
        """The first API process has said so, or is gone."""
        assert self.first is not None
        asyncio.get_running_loop().remove_reader(self.first.fileno())
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.others is not None:
            self.others.finish()
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
