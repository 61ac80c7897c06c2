"""From entries to running engines: all of them, or none."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from paged.http.api.service import AnyService
from paged.http.app import create_service
from paged.http.engine import AnyEngine, Engine
from paged.http.entries import Entry
from paged.http.options import ServeOptions
from paged.http.request_log import RequestLog
from paged.http.request_report import Reporter
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.child_process import JoinedProcess
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.keeper import Keeping
from paged.runtime.logs import lines_about
from paged.runtime.pooling.engine import PoolingEngine, wants_pooling
from paged.runtime.remote_core import RemoteCore
from paged.runtime.sharing import divide

if TYPE_CHECKING:
    from paged.http.otel import RequestTraces

logger = logging.getLogger(__name__)


@contextmanager
def running(
    entries: Sequence[Entry], options: ServeOptions, doors: Sequence[socket.socket] = ()
) -> Iterator[list[AnyService]]:
    """Engines for all entries, in their order; they are shut down in the end.

    They start one after the other: each fills the cores with compiling, and may time its kernels
    on the device. If one fails, or Ctrl-C is pressed meanwhile, those before it end.

    Args:
        doors: where other API processes join each engine's process; none for no others.

    Raises:
        ConfigError, CheckpointError, ...: what one failed to start with. Where there are several it
            begins with the model's name, and that their memory does not fit is said before any
            is loaded.
    """
    if len(entries) > 1:
        entries = _sharing(entries, options)
    keeping = _keeping(options)

    def start(number: int, config: EngineConfig) -> Engine | PoolingEngine:
        if len(entries) > 1:
            logger.info("Starting model %d of %d", number + 1, len(entries))
        if doors:
            make_core = partial(RemoteCore, door=doors[number])
            return AsyncEngine.from_config(config, make_core=make_core, keeping=keeping)
        return _start_engine(config, options)

    with _services(entries, options, start) as services:
        yield services


@contextmanager
def joined(
    entries: Sequence[Entry], options: ServeOptions, doors: Sequence[str]
) -> Iterator[list[AnyService]]:
    """The same for another API process: `doors` are paths at which engines are or will be."""

    def start(number: int, config: EngineConfig) -> AsyncEngine:
        def join(config: EngineConfig) -> RemoteCore:
            return RemoteCore(config, process=JoinedProcess(doors[number]))

        return AsyncEngine.from_config(config, make_core=join, keeping=_keeping(options))

    with _services(entries, options, start) as services:
        yield services


def check_all_make_text(entries: Sequence[Entry], options: ServeOptions) -> None:
    """Raise ConfigError if a model is none that several API processes can share."""
    for entry in entries:
        if wants_pooling(entry.config):
            raise ConfigError(
                f"--api-server-count {options.api_server_count} is for models that generate text, "
                f"and {entry.name} gives embeddings or scores, which one process does: serve it "
                "apart, or leave out --api-server-count"
            )


@contextmanager
def _services(
    entries: Sequence[Entry],
    options: ServeOptions,
    start: Callable[[int, EngineConfig], Engine | PoolingEngine],
) -> Iterator[list[AnyService]]:
    traces = _traces(options)
    engines: list[AnyEngine] = []
    try:
        services = []
        for number, entry in enumerate(entries):
            with _concerning(entry, len(entries)):
                engine = start(number, entry.config)
            engines.append(engine)
            services.append(_service(engine, entry, number, options, traces))
        yield services
    finally:
        _call_all([each.shutdown for each in engines] + [each.close for each in traces])


def _call_all(ends: Sequence[Callable[[], None]]) -> None:
    """At the same time, so that those that hang take no longer than one."""
    threads = [threading.Thread(target=each, name="paged-end") for each in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _sharing(entries: Sequence[Entry], options: ServeOptions) -> list[Entry]:
    """The same with the share of the device's memory that each gets."""
    if not options.engine_process:
        raise ConfigError("--no-engine-process is for one model: each of several has its own")
    configs = {entry.name: entry.config for entry in entries}
    shares = divide(configs, {entry.name: entry.share for entry in entries})
    return [
        replace(entry, config=replace(entry.config, gpu_memory_utilization=shares[entry.name]))
        for entry in entries
    ]


@contextmanager
def _concerning(entry: Entry, total: int) -> Iterator[None]:
    """Where there are several models, let log lines and errors begin with the name of this one."""
    if total == 1:
        yield
        return
    with lines_about(entry.name):
        try:
            yield
        except Exception as error:
            # Paged's own are made of their message; any other is a bug, and shows where.
            if type(error).__module__.startswith("paged."):
                raise type(error)(f"{entry.name}: {error}") from error
            raise


def _start_engine(config: EngineConfig, options: ServeOptions) -> Engine | PoolingEngine:
    apart = options.engine_process
    # What dies in this process takes it along: there is nothing to start again.
    keeping = _keeping(options, restarts=apart)
    if wants_pooling(config):
        return PoolingEngine.from_config(config, separate_process=apart, keeping=keeping)
    return AsyncEngine.from_config(config, separate_process=apart, keeping=keeping)


def _keeping(options: ServeOptions, *, restarts: bool = True) -> Keeping:
    return Keeping(options.step_timeout, options.max_engine_restarts if restarts else 0)


def _service(
    engine: Engine | PoolingEngine,
    entry: Entry,
    number: int,
    options: ServeOptions,
    traces: Sequence[Reporter],
) -> AnyService:
    return create_service(
        engine,
        entry.names,
        number,
        chat_template=entry.chat_template,
        trust_request_chat_template=entry.trust_request_chat_template,
        answers=entry.answers,
        defaults=entry.defaults,
        response_role=entry.role,
        log_requests=options.enable_log_requests,
        reporters=[*_logs(engine, options), *traces],
    )


def _logs(engine: Engine | PoolingEngine, options: ServeOptions) -> list[Reporter]:
    """What logs the requests that have ended, if that is asked for."""
    if not options.enable_log_requests:
        return []
    shown, outputs = options.max_log_len, options.enable_log_outputs
    return [RequestLog(engine.tokenizer, max_length=shown, outputs=outputs)]


def _traces(options: ServeOptions) -> list[RequestTraces]:
    """What makes spans of them, likewise. Raises ConfigError if it cannot."""
    if options.otlp_traces_endpoint is None:
        return []
    try:
        from paged.http.otel import RequestTraces

        return [RequestTraces.sent_to(options.otlp_traces_endpoint)]
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry: pip install 'paged[otel]' ({error})"
        ) from error
