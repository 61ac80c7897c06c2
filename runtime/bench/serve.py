"""`paged bench serve`: load on a server over HTTP, and what its clients saw of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from tqdm import tqdm

from paged.models.tokenizer import Tokenizer
from paged.runtime.bench.client import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    OpenAIClient,
    first_model,
    request_fields,
)
from paged.runtime.bench.connection import HttpClient
from paged.runtime.bench.load import moments, send_all
from paged.runtime.bench.metrics import ServeSummary
from paged.runtime.bench.options import (
    LoadOptions,
    ReportOptions,
    SamplingOptions,
    ServerOptions,
    WorkloadOptions,
)
from paged.runtime.bench.publish import check_writable, publish
from paged.runtime.bench.report import report_json, report_lines
from paged.runtime.bench.results import BenchResult, Value, as_json, now
from paged.runtime.bench.run_results import run_result
from paged.runtime.bench.selection import select_requests
from paged.runtime.bench.server_metrics import ServerMetrics, look, metric_lines
from paged.runtime.bench.tables import run_lines
from paged.runtime.bench.workloads import BenchRequest, reversed_prompt
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags

# Smaller than the vocabulary of any model in use: for servers whose own is not known.
_SAFE_VOCAB_SIZE = 32_000
_SECONDS_BETWEEN_TRIES = 1.0
_MODELS_TIMEOUT = 30.0
_MOST_FILES = 65_536


@dataclass(frozen=True)
class ServeRun:
    """Everything that was asked of one run."""

    server: ServerOptions
    workload: WorkloadOptions
    load: LoadOptions
    sampling: SamplingOptions
    report: ReportOptions

    @classmethod
    def of(cls, args: argparse.Namespace) -> ServeRun:
        return cls(
            read_flags(ServerOptions, args),
            read_flags(WorkloadOptions, args),
            read_flags(LoadOptions, args),
            read_flags(SamplingOptions, args),
            read_flags(ReportOptions, args),
        )


def run_serve(args: argparse.Namespace) -> int:
    """Returns 0 if every request was answered, else 1.

    Raises:
        ConfigError: the run cannot be made as asked, or the server does not answer.
    """
    run = ServeRun.of(args)
    if run.report.save_result or run.report.append_result:
        _prepare_folder(run.report)
    allow_many_connections()
    measured = uvloop.run(measure(run))
    model, summary = measured.model, measured.summary
    result = serve_result(run, measured)
    flat = _flat(run, model, summary)
    try:
        publish(_lines(run, measured, result), result, run.report, flat)
    finally:
        if run.report.save_result or run.report.append_result:
            path = save_result(run, model, flat | as_json(result))
            sys.stdout.write(f"Saved as {path}\n")
    return 0 if not summary.failures else 1


@dataclass(frozen=True)
class Measured:
    """What a run has seen.

    Attributes:
        model: the name that the server knows it by.
        stages: the parts of the run by name; one, unless concurrency was ramped.
        metrics: what the server's own counters grew by.
    """

    model: str
    stages: list[tuple[str, ServeSummary]]
    metrics: ServerMetrics

    @property
    def summary(self) -> ServeSummary:
        """All stages as one run."""
        summaries = [summary for _, summary in self.stages]
        return ServeSummary(
            [record for summary in summaries for record in summary.records],
            duration=sum(summary.duration for summary in summaries),
            goals=summaries[0].goals,
            client_seconds=sum(summary.client_seconds for summary in summaries),
        )


def _bracketed(host: str) -> str:
    """A host as it stands in a URL: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


async def measure(run: ServeRun) -> Measured:
    """Wait for the server, warm it up, and send it the load."""
    server = run.server
    url = server.base_url or f"http://{_bracketed(server.host)}:{server.port}"
    tokenizer, vocab_size = _vocabulary(run)
    requests = _requests(run, tokenizer, vocab_size)
    stages = _stages(run, requests)
    # uvloop never returns from a loop that ends with a connection open.
    with closing(HttpClient(url, _headers(server), verify=not server.insecure)) as http:
        model = server.served_model_name or server.model or await _await_model(http, url, server)
        client = _client(run, http, model, tokenizer)
        await _await_answer(client, url, requests[0], server.ready_check_timeout_sec)
        await _warm_up(client, requests, run.load)
        before = await look(http)
        with tqdm(total=len(requests), disable=run.report.disable_tqdm, unit="req") as bar:
            done = [
                (stage.name, await _send(stage, client, run, on_done=bar.update))
                for stage in stages
            ]
        metrics = (await look(http)).since(before)
    return Measured(model, done, metrics)


@dataclass(frozen=True)
class _Stage:
    """A part of a run: its requests, when they are sent, and how many at most at once."""

    name: str
    requests: list[BenchRequest]
    times: np.ndarray
    max_concurrency: int | None


def _stages(run: ServeRun, requests: list[BenchRequest]) -> list[_Stage]:
    """Raises ConfigError for a ramp that has something else to say when requests are sent."""
    load, ramp = run.load, run.load.concurrency_ramp
    times = moments(requests, load, load.seed)
    if not ramp:
        return [_Stage(run.report.label or "serve", requests, times, load.max_concurrency)]
    if load.max_concurrency or load.ramp_up_strategy or not math.isinf(load.request_rate):
        raise ConfigError(
            "--concurrency-ramp sends a request whenever one has ended: leave out "
            "--max-concurrency, --request-rate and --ramp-up-strategy"
        )
    if len(requests) < len(ramp):
        raise ConfigError(
            f"--concurrency-ramp has {len(ramp)} stages, and there are {len(requests)} requests"
        )
    parts = np.array_split(np.arange(len(requests)), len(ramp))
    return [
        _Stage(f"concurrency {most}", [requests[i] for i in part], np.zeros(len(part)), most)
        for most, part in zip(ramp, parts, strict=True)
    ]


async def _send(
    stage: _Stage, client: OpenAIClient, run: ServeRun, *, on_done: Callable[[], object]
) -> ServeSummary:
    summary = await send_all(
        stage.requests,
        stage.times,
        client.stream,
        max_concurrency=stage.max_concurrency,
        on_done=on_done,
    )
    return replace(summary, goals=run.report.goodput)


def serve_result(run: ServeRun, measured: Measured) -> BenchResult:
    """What was found, in the form that all benchmarks have."""
    load, server, metrics = run.load, run.server, measured.metrics
    settings: dict[str, Value] = {
        "server": server.base_url or f"{server.host}:{server.port}",
        "backend": server.backend,
        "dataset": run.workload.dataset_name,
        "request_rate": None if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "prefix_hit_rate": metrics.prefix_hit_rate,
    }
    told = {name: value for name, value in settings.items() if value is not None}
    runs = [run_result(stage, name, settings=told) for name, stage in measured.stages]
    if (queue := metrics.queue_times) is not None and len(runs) == 1:
        runs = [replace(runs[0], times=runs[0].times | {"queue": queue})]
    return BenchResult(
        command="serve",
        date=now(),
        model=measured.model,
        label=run.report.label or "",
        runs=tuple(runs),
    )


def _lines(run: ServeRun, measured: Measured, result: BenchResult) -> Iterator[str]:
    yield from report_lines(measured.summary, run.load, run.report)
    yield from metric_lines(measured.metrics)
    if run.load.concurrency_ramp:
        yield ""
        yield from run_lines(result.runs)


def _prepare_folder(report: ReportOptions) -> None:
    """Make the folder of the result file. Raises ConfigError if that cannot be."""
    path = Path(report.result_dir) / (report.result_filename or "result.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--result-dir: {error}") from error
    check_writable(path)


def save_result(run: ServeRun, model: str, report: dict[str, Any]) -> Path:
    """Write the JSON where results are collected; returns where. Raises ConfigError."""
    path = Path(run.report.result_dir) / (run.report.result_filename or _file_name(run, model))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if run.report.append_result else "w", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")
    except OSError as error:
        raise ConfigError(f"The results cannot be saved: {error}") from error
    return path


def _flat(run: ServeRun, model: str, summary: ServeSummary) -> dict[str, Any]:
    about = {
        "endpoint_type": run.server.backend,
        "backend": run.server.backend,
        "model_id": model,
        "tokenizer_id": run.server.tokenizer or model,
    }
    return report_json(summary, run.load, run.report, about)


def allow_many_connections() -> None:
    """Raise the limit of open files: each request in flight holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _requests(
    run: ServeRun, tokenizer: Tokenizer | None, vocab_size: int | None
) -> list[BenchRequest]:
    requests = select_requests(
        run.workload,
        seed=run.load.seed,
        vocab_size=vocab_size,
        encode=None if tokenizer is None else tokenizer.encode,
    )
    if _is_chat(run.server):
        return [_as_text(request, tokenizer) for request in requests]
    return requests


def _client(
    run: ServeRun, http: HttpClient, model: str, tokenizer: Tokenizer | None
) -> OpenAIClient:
    is_chat = _is_chat(run.server)
    ignore_eos = run.load.ignore_eos or run.workload.generated
    return OpenAIClient(
        http=http,
        path=run.server.endpoint or (CHAT_COMPLETIONS if is_chat else COMPLETIONS),
        is_chat=is_chat,
        fields=request_fields(run.server, run.sampling, model, ignore_eos=ignore_eos),
        tokenizer=tokenizer,
        timeout=run.server.request_timeout_sec,
    )


def _is_chat(server: ServerOptions) -> bool:
    return server.backend == "openai-chat"


def _headers(server: ServerOptions) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    return ({"Authorization": f"Bearer {key}"} if key else {}) | dict(server.header)


def _vocabulary(run: ServeRun) -> tuple[Tokenizer | None, int | None]:
    """The tokenizer, if one is named, and below what ids are drawn (None: anywhere)."""
    name = run.server.tokenizer
    if name is None and run.server.model and Path(run.server.model).expanduser().exists():
        name = run.server.model
    if name is None:
        if run.workload.dataset_name == "baseline":
            return None, None
        return None, _SAFE_VOCAB_SIZE
    from paged.models.loading import resolve_model

    source = resolve_model(name, load_format="dummy")
    tokenizer = None if run.server.skip_tokenizer_init else source.tokenizer()
    return tokenizer, source.config.vocab_size


def _as_text(request: BenchRequest, tokenizer: Tokenizer | None) -> BenchRequest:
    if isinstance(request.prompt, str):
        return request
    if tokenizer is None:
        raise ConfigError("--backend openai-chat sends texts: give --tokenizer to make them")
    return replace(request, prompt=tokenizer.decode(request.prompt))


async def _await_model(http: HttpClient, url: str, server: ServerOptions) -> str:
    """The server's first model, once it can be reached."""
    patience = _Patience(server.ready_check_timeout_sec)
    while True:
        try:
            async with asyncio.timeout(_MODELS_TIMEOUT):
                return await first_model(http)
        except OSError as error:
            await patience.wait(_unreachable(url, error))


def _unreachable(url: str, error: OSError) -> str:
    return (
        f"No server at {url} ({error}): start one, or say where with --host and --port; see "
        "docs/failures.md#connection-refused"
    )


async def _await_answer(
    client: OpenAIClient, url: str, request: BenchRequest, seconds: float
) -> None:
    """Return once a request is answered; a request that is refused is not tried again."""
    if seconds <= 0:
        return
    patience = _Patience(seconds)
    client = replace(client, timeout=min(client.timeout, seconds))
    while True:
        record = await client.stream(reversed_prompt(request))
        if record.error is None:
            return
        if record.error.startswith("HTTP 4"):
            raise ConfigError(f"The server refuses the first request: {record.error}")
        await patience.wait(f"{url} does not answer the first request: {record.error}")


class _Patience:
    """Waits between the tries to reach a server, and tells once what for."""

    def __init__(self, seconds: float) -> None:
        self._give_up = time.monotonic() + seconds
        self._told = False

    async def wait(self, trouble: str) -> None:
        """Raises ConfigError, which says `trouble`, when the time is up."""
        left = self._give_up - time.monotonic()
        if left < _SECONDS_BETWEEN_TRIES:
            raise ConfigError(trouble)
        if not self._told:
            sys.stderr.write(f"{trouble}. Trying for {left:.0f} seconds.\n")
            self._told = True
        await asyncio.sleep(_SECONDS_BETWEEN_TRIES)


async def _warm_up(client: OpenAIClient, requests: list[BenchRequest], load: LoadOptions) -> None:
    if load.num_warmups > 0:
        chosen = [reversed_prompt(requests[i % len(requests)]) for i in range(load.num_warmups)]
        await send_all(
            chosen,
            [0.0] * len(chosen),
            client.stream,
            max_concurrency=load.max_concurrency,
            on_done=lambda: None,
        )


def _file_name(run: ServeRun, model: str) -> str:
    rate = run.load.request_rate
    limit = run.load.max_concurrency
    parts = [
        run.report.label or run.server.backend,
        f"{rate:g}qps",
        *([f"concurrency{limit}"] if limit else []),
        Path(model).name,
        datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
    ]
    return "-".join(parts) + ".json"
