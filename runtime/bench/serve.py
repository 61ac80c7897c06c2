"""`paged bench serve`: load on a server over HTTP, and what its clients saw of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

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
from paged.runtime.bench.report import report_json, report_lines
from paged.runtime.bench.selection import select_requests
from paged.runtime.bench.workloads import BenchRequest
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
    allow_many_connections()
    model, summary = uvloop.run(measure(run))
    for line in report_lines(summary, run.load, run.report):
        sys.stdout.write(line + "\n")
    if run.report.save_result or run.report.append_result:
        path = save_result(run, model, summary)
        sys.stdout.write(f"Saved as {path}\n")
    return 0 if not summary.failures else 1


async def measure(run: ServeRun) -> tuple[str, ServeSummary]:
    """The name of the model, and what its clients saw."""
    server = run.server
    url = server.base_url or f"http://{server.host}:{server.port}"
    tokenizer, vocab_size = _vocabulary(run)
    requests = _requests(run, tokenizer, vocab_size)
    times = moments(requests, run.load)
    # uvloop never returns from a loop that ends with a connection open.
    with closing(HttpClient(url, _headers(server), verify=not server.insecure)) as http:
        model = server.served_model_name or server.model or await _await_model(http, url, server)
        client = _client(run, http, model, tokenizer)
        await _await_answer(client, url, requests[0], server.ready_check_timeout_sec)
        await _warm_up(client, requests, run.load)
        with tqdm(total=len(requests), disable=run.report.disable_tqdm, unit="req") as bar:
            summary = await send_all(
                requests,
                times,
                client.stream,
                max_concurrency=run.load.max_concurrency,
                on_done=bar.update,
            )
    return model, replace(summary, goals=run.report.goodput)


def save_result(run: ServeRun, model: str, summary: ServeSummary) -> Path:
    """Write the JSON; returns where."""
    about = {
        "endpoint_type": run.server.backend,
        "backend": run.server.backend,
        "model_id": model,
        "tokenizer_id": run.server.tokenizer or model,
    }
    report = report_json(summary, run.load, run.report, about)
    path = Path(run.report.result_dir) / (run.report.result_filename or _file_name(run, model))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if run.report.append_result else "w", encoding="utf-8") as file:
        file.write(json.dumps(report) + "\n")
    return path


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
    key = os.environ.get("OPENAI_API_KEY")
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
    return f"No server at {url} ({error}): start one, or say where with --host and --port"


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


def reversed_prompt(request: BenchRequest) -> BenchRequest:
    """The same work, but nothing that a prefix cache could keep for the request itself."""
    prompt = request.prompt
    turned = " ".join(reversed(prompt.split())) if isinstance(prompt, str) else prompt[::-1]
    return replace(request, prompt=turned)


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
