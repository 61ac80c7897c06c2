"""What a streamed chunk costs each process on its way: engine process, server and client.

    python benchmarks/serving_path.py --streams 256 --step-ms 40 [--text]

A closed loop of 300-token prompts over real sockets: a server as `paged serve` runs it, its engine
in a process of its own, and the client of `paged bench serve`. Only the device is a clock, which
gives every stream a token each step (see `process_split.py`). What the kernel counted as each
thread's time on a processor, over the chunks that came, is the cost; a server can stream as many
chunks a second as fit into a second of its process, whose threads take turns. Streams carry token
ids, as in the comparison with vLLM, or with --text what they decode to.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.process_split import MAX_MODEL_LEN, VOCABULARY, Clock
from paged.http.app import create_app
from paged.http.options import ServeOptions
from paged.http.serve import serve
from paged.models.loading import resolve_model
from paged.runtime import async_engine
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.bench.client import COMPLETIONS, OpenAIClient, request_fields
from paged.runtime.bench.connection import HttpClient
from paged.runtime.bench.load import send_all
from paged.runtime.bench.metrics import ServeSummary
from paged.runtime.bench.options import SamplingOptions, ServerOptions
from paged.runtime.bench.serve import allow_many_connections
from paged.runtime.bench.workloads import IdRange, random_requests
from paged.runtime.config import EngineConfig
from paged.runtime.engine import Engine
from paged.runtime.engine_process import main as serve_core
from paged.runtime.front import Front
from paged.runtime.remote_core import RemoteCore
from paged.runtime.sampling_params import SamplingParams

PROMPT, OUTPUT = 300, 128


def run_server(step_ms: str, text: str) -> int:
    """The server; it tells the process of its engine and, when ready, where it listens."""
    front = Front(
        tokenizer=resolve_model(None).tokenizer() if text == "text" else None,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCABULARY,
        max_logprobs=0,
        default_params=SamplingParams(),
    )
    core = RemoteCore(EngineConfig(), program=(__file__, "--engine", step_ms))
    print(f"Engine: {core.pid}", flush=True)
    with patch.object(async_engine, "load_engine", lambda *_, **how: Engine(core, front)):
        engine = AsyncEngine()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = ServeOptions(disable_uvicorn_access_log=True)
        status = serve(create_app(engine, ["m"]), listener, options)
    engine.shutdown()
    return status


def run_engine(step_ms: str, descriptor: str) -> int:
    """The engine process."""
    return serve_core(int(descriptor), lambda config: Clock(float(step_ms) / 1e3))


@contextmanager
def server(step_ms: float, *, text: bool) -> Iterator[tuple[int, int, str]]:
    """A server that is ready: its process, its engine's, and its address."""
    command = [sys.executable, __file__, "--server", str(step_ms), "text" if text else "ids"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        engine = re.match(r"Engine: (\d+)", process.stdout.readline())
        ready = re.match(r"Ready: .* at (http\S+)/v1", process.stdout.readline())
        assert engine, "the server did not start"
        assert ready, "the server did not get ready"
        yield process.pid, int(engine[1]), ready[1]
    finally:
        process.terminate()
        process.wait()


def busy_seconds(process: int) -> dict[str, float]:
    """Time on a processor of each thread of a process, by its number; the first is the main one."""
    threads = sorted(Path(f"/proc/{process}/task").iterdir(), key=lambda path: int(path.name))
    return {
        thread.name: int((thread / "schedstat").read_text().split()[0]) / 1e9 for thread in threads
    }


async def load(url: str, streams: int, num_requests: int, *, text: bool) -> ServeSummary:
    """Keep so many streams running."""
    requests = random_requests(num_requests, PROMPT, OUTPUT, seed=1, ids=IdRange.below(VOCABULARY))
    server = ServerOptions(skip_tokenizer_init=not text)
    fields = request_fields(server, SamplingOptions(), "m", ignore_eos=True)
    with closing(HttpClient(url, {})) as http:
        client = OpenAIClient(
            http=http, path=COMPLETIONS, is_chat=False, fields=fields, tokenizer=None, timeout=600
        )
        return await send_all(
            requests,
            [0.0] * num_requests,
            client.stream,
            max_concurrency=streams,
            on_done=lambda: None,
        )


def report(args: argparse.Namespace) -> Iterator[str]:
    """Measure, and say what came out."""
    with server(args.step_ms, text=args.text) as (api, engine, url):
        uvloop.run(load(url, args.streams, args.streams, text=args.text))  # warm up
        before = [busy_seconds(process) for process in (api, engine, os.getpid())]
        summary = uvloop.run(load(url, args.streams, args.rounds * args.streams, text=args.text))
        after = [busy_seconds(process) for process in (api, engine, os.getpid())]
    assert not summary.failures, summary.failures
    num_chunks = sum(len(record.chunk_times) for record in summary.records)
    num_tokens = sum(record.num_output_tokens for record in summary.records)
    yield (
        f"{num_chunks / summary.duration:,.0f} chunks/s of {num_tokens / num_chunks:.2f} tokens, "
        f"{len(summary.records) / summary.duration:.1f} requests/s"
    )
    for name, first, last in zip(("server", "engine", "client"), before, after, strict=True):
        costs = [1e6 * (last[thread] - first.get(thread, 0.0)) / num_chunks for thread in last]
        threads = " + ".join(f"{cost:.1f}" for cost in costs if cost > 0.05)
        yield f"  {name:8} {sum(costs):6.1f} us a chunk   by thread: {threads}"


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=2, help="requests of each stream")
    parser.add_argument("--text", action="store_true", help="stream text, not token ids")
    args = parser.parse_args()
    allow_many_connections()
    print("\n".join(report(args)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        sys.exit(run_server(*sys.argv[2:]))
    if sys.argv[1:2] == ["--engine"]:
        sys.exit(run_engine(*sys.argv[2:]))
    main()
