"""`paged serve`: an engine, the application in front of it, and their life from bind to drain."""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import logging
import os
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from paged.http.api.answers import AnswerFormat
from paged.http.api.service import AnyService
from paged.http.api_processes import ApiProcesses, IsReady
from paged.http.app import create_app
from paged.http.engine import AnyEngine, Engine
from paged.http.logs import configure_logging, leave_out, log_stats
from paged.http.options import ServeOptions
from paged.http.peers import Peers
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.pooling.engine import PoolingEngine, wants_pooling
from paged.runtime.remote_core import RemoteCore
from paged.runtime.wire import Channel

logger = logging.getLogger(__name__)

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
# Proxies keep idle connections for 60 s; the one who closes first must not be the server.
_KEEP_ALIVE = 75
# What aborted requests get to say so before their connections are cut.
_LAST_WORDS = 5
_WATCH_INTERVAL = 1.0
# Streams make some objects for each token and nearly none that only the collector would find; by
# Python's own 700 it would look ten times a step.
_OBJECTS_BETWEEN_COLLECTIONS = 20_000
# Addresses that stand for all of a machine's, and the one by which it finds itself there.
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit status, 1 if the engine died."""
    options = _with_key(read_flags(ServeOptions, args))
    config = read_flags(EngineConfig, args)
    configure_logging(options.uvicorn_log_level)
    _note_ignored(args)
    # Before the model is loaded: minutes later is late to hear that something is wrong.
    _chat_template(options)
    with _bind(options.host, options.port) as listener:
        if options.api_server_count > 1:
            return _run_several(config, options, listener)
        engine = _start_engine(config, options)
        try:
            return serve(make_app(engine, config, options), [listener], options)
        finally:
            engine.shutdown()


def _run_several(config: EngineConfig, options: ServeOptions, listener: socket.socket) -> int:
    """As the first of several API processes."""
    if wants_pooling(config):
        raise ConfigError(
            f"--api-server-count {options.api_server_count} is for models that generate text; "
            "embeddings and scores are made in one process"
        )
    with ApiProcesses(config, options, listener) as others:
        make_core = partial(RemoteCore, door=others.door)
        engine = AsyncEngine.from_config(config, make_core=make_core)
        try:
            others.await_ready()
            app = make_app(engine, config, options, others.peers)
            return serve(app, [listener, others.private], options, others=others)
        finally:
            others.end(options.shutdown_timeout + _LAST_WORDS)
            engine.shutdown()


def make_app(
    engine: Engine | PoolingEngine,
    config: EngineConfig,
    options: ServeOptions,
    peers: Peers | None = None,
) -> Starlette:
    """The application that the options describe."""
    return create_app(
        engine,
        options.served_model_name or (config.model or DEMO_MODEL_NAME,),
        api_keys=options.api_key,
        max_body_size=options.max_body_size,
        chat_template=_chat_template(options),
        trust_request_chat_template=options.trust_request_chat_template,
        answers=_answer_format(options),
        log_requests=options.enable_log_requests,
        allowed_origins=options.allowed_origins,
        allowed_methods=options.allowed_methods,
        allowed_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        peers=peers,
    )


def _with_key(options: ServeOptions) -> ServeOptions:
    """Options with the key in the environment, unless they have keys of their own."""
    keys = options.api_key or tuple(filter(None, [os.getenv("PAGED_API_KEY")]))
    return replace(options, api_key=keys)


def _start_engine(config: EngineConfig, options: ServeOptions) -> Engine | PoolingEngine:
    """Embeddings and scores are made in this process: they have no streams to keep going."""
    if wants_pooling(config):
        return PoolingEngine.from_config(config)
    return AsyncEngine.from_config(config, separate_process=options.engine_process)


def serve(
    app: Starlette,
    sockets: list[socket.socket],
    options: ServeOptions,
    *,
    others: ApiProcesses | None = None,
    first: Channel | None = None,
) -> int:
    """Run the application on bound sockets; returns the exit status.

    Args:
        sockets: that of clients is the first.
        others: the other API processes, for the first of several.
        first: to the first of several, for one of the others.
    """
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
    server = _Server(config, app, options, others=others, first=first)
    # A walk over all that start-up made would stop every stream for tenths of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(server, sockets))


async def _serve(server: _Server, sockets: list[socket.socket]) -> int:
    engine = server.engine
    watchers = [asyncio.create_task(_stop_when_dead(server))]
    if not server.options.disable_log_stats and server.first is None:
        watchers.append(asyncio.create_task(log_stats(engine)))
    try:
        await server.serve(sockets=sockets)
    finally:
        for watcher in watchers:
            watcher.cancel()
    return 1 if server.has_failed else 0


async def _stop_when_dead(server: _Server) -> None:
    """A dead engine does not come back: leave, so that a supervisor starts another process."""
    while not server.is_broken:
        await asyncio.sleep(_WATCH_INTERVAL)
    server.has_failed = True
    who = "The engine" if server.engine.errored else "An API process"
    logger.critical("%s has stopped; shutting down", who)
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
        self.service: AnyService = app.state.service
        self.options = options
        self.has_failed = False
        self.others, self.first = others, first

    @property
    def engine(self) -> AnyEngine:
        return self.service.engine

    @property
    def is_broken(self) -> bool:
        """Whether the engine is dead, or one of the other API processes."""
        others_run = self.others is None or self.should_exit or self.others.are_running
        return self.engine.errored or not others_run

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
        where = f"{_url(sockets[0])}/v1{_who_else(sockets[0], has_keys=bool(self.options.api_key))}"
        sys.stdout.write(f"Ready: {self.service.model_name} at {where}\n")
        sys.stdout.flush()

    def _finish(self) -> None:
        """The first API process has said so, or is gone."""
        assert self.first is not None
        asyncio.get_running_loop().remove_reader(self.first.fileno())
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.others is not None:
            self.others.finish()
        if num_running := self.service.num_running:
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
        await self.service.abort_running()


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


def _chat_template(options: ServeOptions) -> str | None:
    """The template's text, given itself or as the name of a file."""
    given = options.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {given}: neither a file that can be read "
            f"({getattr(error, 'strerror', error)}) nor a template, which would have a {{ in it"
        ) from error


def _answer_format(options: ServeOptions) -> AnswerFormat:
    return AnswerFormat(
        tool_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        auto=options.enable_auto_tool_choice,
        hides_tools=options.exclude_tools_when_tool_choice_none,
    )


def _note_ignored(args: argparse.Namespace) -> None:
    if args.swap_space is not None:
        logger.warning("--swap-space has no effect: preempted sequences are computed again")
    if args.disable_log_requests:
        logger.warning("--disable-log-requests has no effect: requests are not logged by default")
