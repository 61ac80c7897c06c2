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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from paged.http.api.service import AnyService
from paged.http.api_processes import ApiProcesses
from paged.http.app import create_server
from paged.http.connection import Connection
from paged.http.entries import Entry, read_entries
from paged.http.gate import Gate
from paged.http.keys import KeyRing, read_keys
from paged.http.listener import bound
from paged.http.logs import configure_logging, leave_out
from paged.http.options import ServeOptions
from paged.http.peers import Peers
from paged.http.server import LAST_WORDS, TIME_FOR_OTHERS, Opened, Opening, Server
from paged.http.start import check_all_make_text, running
from paged.runtime.config import EngineConfig
from paged.runtime.ending import LONGEST_SAVING
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.hints import KEY_VARIABLES, unread_variables
from paged.runtime.hosts.headless import serve_headless
from paged.runtime.wire import Channel

logger = logging.getLogger(__name__)

# Streams make some objects for each token and nearly none that only the collector would find; by
# Python's own 700 it would look ten times a step.
_OBJECTS_BETWEEN_COLLECTIONS = 20_000


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit status, 1 if an engine died."""
    options = with_key(read_flags(ServeOptions, args))
    entries = read_entries(args)
    configure_logging(options.uvicorn_log_level, options.log_format)
    _check_hosts(entries, options)
    _note_ignored(args)
    if options.headless:
        return follow(entries[0].config)
    _allow_many_connections()
    check_doors(options)
    load = _load_alone if options.api_server_count == 1 else _load_several
    # Before a model is loaded: minutes later is late to hear that the port is taken.
    with bound(options) as listener:
        status = serve(partial(load, entries, options, listener), listener, options)
    return leave(status)


def _load_alone(
    entries: Sequence[Entry], options: ServeOptions, listener: socket.socket, stack: ExitStack
) -> Opened:
    """As the only API process."""
    services = stack.enter_context(running(entries, options))
    return Opened(make_app(services, options), seconds_to_save=_seconds_to_save(entries))


def _load_several(
    entries: Sequence[Entry], options: ServeOptions, listener: socket.socket, stack: ExitStack
) -> Opened:
    """As the first of several API processes."""
    check_all_make_text(entries, options)
    others = stack.enter_context(ApiProcesses(entries, options, listener))
    services = stack.enter_context(running(entries, options, others.doors))
    stack.callback(others.end, options.shutdown_timeout + TIME_FOR_OTHERS)  # before the engines
    others.await_ready()
    app, seconds = make_app(services, options, others.peers), _seconds_to_save(entries)
    return Opened(app, others.private, others, seconds)


def _seconds_to_save(entries: Sequence[Entry]) -> float:
    """That engines may take in the end, all at the same time, to write pages to disk."""
    return LONGEST_SAVING if any(each.config.kv_offloading_dir for each in entries) else 0.0


def make_app(
    services: Sequence[AnyService],
    options: ServeOptions,
    peers: Peers | None = None,
    *,
    keeps_responses: bool = True,
) -> Starlette:
    """The application that the options describe, one of several if it has peers.

    Args:
        keeps_responses: see `create_server`.
    """
    return create_server(
        services,
        api_keys=options.api_key,
        admin_keys=options.admin_api_key,
        reads_traces=options.otlp_traces_endpoint is not None,
        key_ring=None if options.api_keys_file is None else KeyRing(Path(options.api_keys_file)),
        metrics_need_key=options.metrics_need_key,
        max_body_size=options.max_body_size,
        default_timeout=options.default_timeout,
        tells_tokenizer=options.enable_tokenizer_info_endpoint,
        allowed_origins=options.allowed_origins,
        allowed_methods=options.allowed_methods,
        allowed_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        peers=peers or Peers(),
        keeps_responses=keeps_responses,
    )


def _check_hosts(entries: Sequence[Entry], options: ServeOptions) -> None:
    """Raise ConfigError where this is no host of several, or not the one that it is told to be."""
    config = entries[0].config
    if len(entries) > 1 and any(entry.config.nnodes > 1 for entry in entries):
        raise ConfigError("--nnodes is for one model: start a server for each of several")
    if len(entries) > 1 and any(entry.config.pipeline_parallel_size > 1 for entry in entries):
        raise ConfigError("--pipeline-parallel-size is for one model: start a server for each")
    if config.nnodes > 1 and not options.engine_process:
        raise ConfigError("--nnodes needs an engine process: leave out --no-engine-process")
    if options.headless and config.nnodes == 1:
        raise ConfigError("--headless is for a host of several: give --nnodes and --node-rank")
    if options.headless and config.node_rank == 0:
        raise ConfigError("--headless is not for rank 0, which answers HTTP: give --node-rank")
    if config.node_rank and not options.headless:
        raise ConfigError(
            f"--node-rank {config.node_rank} needs --headless: rank 0 alone answers HTTP"
        )


def follow(config: EngineConfig) -> int:
    """Be a host that answers no HTTP, until a signal; returns the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def tell() -> None:
        sys.stdout.write(f"Following: rank {config.node_rank} of {config.nnodes}\n")
        sys.stdout.flush()

    serve_headless(config, tell)
    return 0


def _allow_many_connections() -> None:
    """Each takes a file descriptor, of which many systems give 1,024 unless they are asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def with_key(options: ServeOptions) -> ServeOptions:
    """Options with the key in the environment, unless they have keys of their own."""
    found = next(filter(None, map(os.getenv, KEY_VARIABLES)), None)
    return replace(options, api_key=options.api_key or tuple(filter(None, [found])))


def check_doors(options: ServeOptions) -> None:
    """Keys and certificates, read once, long before the server does.

    Raises:
        ConfigError: one cannot be read or used.
    """
    _check_metrics_key(options)
    _check_certificates(options)
    if options.api_keys_file is not None:
        read_keys(Path(options.api_keys_file))


def _check_metrics_key(options: ServeOptions) -> None:
    if options.metrics_need_key and not options.api_key and options.api_keys_file is None:
        raise ConfigError("--metrics-need-key needs --api-key, --api-keys-file or PAGED_API_KEY")


def serve(
    load: Callable[[ExitStack], Opened],
    listener: socket.socket,
    options: ServeOptions,
    first: Channel | None = None,
) -> int | None:
    """Serve on a bound socket; returns the exit status, None if it ended before `load` did.

    Args:
        load: see `Opening`.
        first: to the first of several API processes, for one of the others.

    Raises:
        ConfigError, CheckpointError, ...: what `load` raises.
    """
    if options.disable_access_log_for_endpoints:
        leave_out(options.disable_access_log_for_endpoints)
    gate = Gate()
    config = server_config(gate, options)
    server = Server(config, gate, options, listener, first)
    opening = Opening(partial(settled, load), gate)
    try:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.run_with(opening))
    finally:
        opening.close()
        server.has_left()
    if server.failure is not None:
        raise server.failure
    return server.status if opening.opened.done() else None


def leave(status: int | None) -> int:
    """Leave at once where something is still being loaded: the exit status otherwise.

    Python would wait for that. Engine processes leave with this one.
    """
    if status is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return status


def settled[T](load: Callable[[ExitStack], T], stack: ExitStack) -> T:
    """What is opened, and the garbage collector told that it is here to stay."""
    opened = load(stack)
    # A walk over all that start-up made would stop every stream for tenths of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])
    return opened


def server_config(app: ASGIApp, options: ServeOptions) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
        timeout_keep_alive=options.timeout_keep_alive,
        timeout_graceful_shutdown=LAST_WORDS,
        lifespan="off",
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=_whose_certificate(options),
    )


def _whose_certificate(options: ServeOptions) -> ssl.VerifyMode:
    """Clients need a certificate where there is someone to vouch for it."""
    return ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE


def _check_certificates(options: ServeOptions) -> None:
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
    for line in unread_variables(os.environ):
        logger.warning(line)
    if args.disable_log_requests:
        logger.warning("--disable-log-requests has no effect: requests are not logged by default")
