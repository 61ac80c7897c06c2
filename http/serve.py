"""`paged serve`: an engine, the application in front of it, and their life from bind to drain."""

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
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from paged.http.api.answers import AnswerFormat
from paged.http.api.defaults import RequestDefaults
from paged.http.api.service import AnyService
from paged.http.app import create_app
from paged.http.connection import Connection
from paged.http.engine import AnyEngine, Engine
from paged.http.listener import bound, where
from paged.http.logs import configure_logging, leave_out, log_stats
from paged.http.options import ServeOptions
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.pooling.engine import PoolingEngine, wants_pooling

logger = logging.getLogger(__name__)

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
# Proxies keep idle connections for 60 s; the one who closes first must not be the server.
_KEEP_ALIVE = 75
# What aborted requests get to say so before their connections are cut.
_LAST_WORDS = 5
_WATCH_INTERVAL = 1.0


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit status, 1 if the engine died."""
    options = _with_key(read_flags(ServeOptions, args))
    config = read_flags(EngineConfig, args)
    configure_logging(options.uvicorn_log_level)
    _note_ignored(args)
    _allow_many_connections()
    chat_template = _chat_template(options)
    _check_certificates(options)
    # Before the model is loaded: minutes later is late to hear that the port is taken.
    with bound(options) as listener:
        engine = _start_engine(config, options)
        try:
            app = create_app(
                engine,
                options.served_model_name or (config.model or DEMO_MODEL_NAME,),
                api_keys=options.api_key,
                max_body_size=options.max_body_size,
                chat_template=chat_template,
                trust_request_chat_template=options.trust_request_chat_template,
                answers=_answer_format(options),
                defaults=_defaults(options),
                response_role=options.response_role,
                tells_tokenizer=options.enable_tokenizer_info_endpoint,
                log_requests=options.enable_log_requests,
                allowed_origins=options.allowed_origins,
                allowed_methods=options.allowed_methods,
                allowed_headers=options.allowed_headers,
                allow_credentials=options.allow_credentials,
            )
            return serve(app, listener, options)
        finally:
            engine.shutdown()


def _allow_many_connections() -> None:
    """Each takes a file descriptor, of which many systems give 1,024 unless they are asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _with_key(options: ServeOptions) -> ServeOptions:
    """Options with the key in the environment, unless they have keys of their own."""
    keys = options.api_key or tuple(filter(None, [os.getenv("PAGED_API_KEY")]))
    return replace(options, api_key=keys)


def _start_engine(config: EngineConfig, options: ServeOptions) -> Engine | PoolingEngine:
    """Embeddings and scores are made in this process: they have no streams to keep going."""
    if wants_pooling(config):
        return PoolingEngine.from_config(config)
    return AsyncEngine.from_config(config, separate_process=options.engine_process)


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
    engine = server.engine
    watchers = [asyncio.create_task(_stop_when_dead(server))]
    if not server.options.disable_log_stats:
        watchers.append(asyncio.create_task(log_stats(engine)))
    try:
        await server.serve(sockets=[listener])
    finally:
        for watcher in watchers:
            watcher.cancel()
    return 1 if engine.errored else 0


async def _stop_when_dead(server: _Server) -> None:
    """A dead engine does not come back: leave, so that a supervisor starts another process."""
    while not server.engine.errored:
        await asyncio.sleep(_WATCH_INTERVAL)
    logger.critical("The engine has stopped; shutting down")
    server.should_exit = True


class _Server(uvicorn.Server):
    """Drains on the first signal, leaves on the second.

    Draining: no new connections; running requests finish, or are aborted when their time is up.
    """

    def __init__(self, config: uvicorn.Config, app: Starlette, options: ServeOptions) -> None:
        super().__init__(config)
        self.service: AnyService = app.state.service
        self.options = options

    @property
    def engine(self) -> AnyEngine:
        return self.service.engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGINT and SIGTERM."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        sys.stdout.write(f"Ready: {self.service.model_name} at {where(sockets[0], self.options)}\n")
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
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


def _defaults(options: ServeOptions) -> RequestDefaults:
    return RequestDefaults(
        tokens_as_ids=options.return_tokens_as_token_ids,
        include_usage=options.enable_force_include_usage,
        chat_template_kwargs=options.default_chat_template_kwargs or {},
    )


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
    if args.swap_space is not None:
        logger.warning("--swap-space has no effect: preempted sequences are computed again")
    if args.disable_log_requests:
        logger.warning("--disable-log-requests has no effect: requests are not logged by default")
