"""What a streamed chunk costs each process on its way: engine process, server and client.

    python benchmarks/serving_path.py --streams 256 --step-ms 40 [--text] [--no-engine-process]

A closed loop of 300-token prompts over real sockets: a server as `paged serve` runs it, its engine
in a process of its own, and the client of `paged bench serve`. Only the device is a clock, which
gives every stream a token each step (see `device_clock.py`). What the kernel counted as each
thread's time on a processor, over the chunks that came, is the cost; a server can stream as many
chunks a second as fit into a second of its process, whose threads take turns. Streams carry token
ids, as in the comparison with vLLM, or with --text what they decode to.

The device is busy for as much of the time as its next step comes before the last has ended. With
--no-engine-process the server and its engine take turns in one process, as they would without
`runtime/remote_core.py`, and the share tells what the second process is for.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.against_vllm import metric
from benchmarks.device_clock import MAX_MODEL_LEN, VOCABULARY, Clock
from paged.http.app import create_app
from paged.http.options import ServeOptions
from paged.http.serve import leave, serve
from paged.http.server import Opened
from paged.models.loading import resolve_model
from paged.runtime import async_engine
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.bench.client import COMPLETIONS, OpenAIClient, request_fields
from paged.runtime.bench.connection import HttpClient
from paged.runtime.bench.load import send_all
from paged.runtime.bench.metrics import ServeSummary
from paged.runtime.bench.options import SamplingOptions, ServerOptions
from paged.runtime.bench.serve import allow_many_connections
from paged.runtime.bench.workloads import BenchRequest, IdRange, random_requests
from paged.runtime.config import EngineConfig
from paged.runtime.engine import Core, Engine
from paged.runtime.engine_process import main as serve_core
from paged.runtime.front import Front
from paged.runtime.remote_core import RemoteCore
from paged.runtime.sampling_params import SamplingParams

PROMPT, OUTPUT = 300, 128


def run_server(step_ms: str, text: str, processes: str) -> int:
    """The server; it tells the process of its engine and, when ready, where it listens."""
    front = Front(
        tokenizer=resolve_model(None).tokenizer() if text == "text" else None,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCABULARY,
        max_logprobs=0,
        default_params=SamplingParams(),
    )
    core: Core
    if processes == "two":
        core = RemoteCore(EngineConfig(), program=(__file__, "--engine", step_ms))
        print(f"Engine: {core.pid}", flush=True)
    else:
        core = Clock(float(step_ms) / 1e3)
        print(f"Engine: {os.getpid()}", flush=True)
    with patch.object(async_engine, "load_engine", lambda *_, **how: Engine(core, front)):
        engine = AsyncEngine()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = ServeOptions(disable_uvicorn_access_log=True)
        app = create_app(engine, ["m"])
        status = serve(lambda _: Opened(app), listener, options)
    engine.shutdown()
    return leave(status)


def run_engine(step_ms: str, descriptor: str) -> int:
    """The engine process."""
    return serve_core(int(descriptor), lambda config: Clock(float(step_ms) / 1e3))


@contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[dict[str, int], str]]:
    """A server that is ready: its processes by name, and its address."""
    how = ("text" if args.text else "ids", "one" if args.no_engine_process else "two")
    command = [sys.executable, __file__, "--server", str(args.step_ms), *how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        engine = re.match(r"Engine: (\d+)", process.stdout.readline())
        ready = re.match(r"Ready: .* at (http\S+)/v1", process.stdout.readline())
        assert engine, "the server did not start"
        assert ready, "the server did not get ready"
        processes = {"server": process.pid}
        if not args.no_engine_process:
            processes["engine"] = int(engine[1])
        yield processes, ready[1]
    finally:
        process.terminate()
        process.wait()


def busy_seconds(process: int) -> dict[str, float]:
    """Time on a processor of each thread of a process, by its number; the first is the main one."""
    threads = sorted(Path(f"/proc/{process}/task").iterdir(), key=lambda path: int(path.name))
    return {
        thread.name: int((thread / "schedstat").read_text().split()[0]) / 1e9 for thread in threads
    }


def work(num_requests: int, *, seed: int, vocabulary: int = VOCABULARY) -> list[BenchRequest]:
    """Requests of 300 tokens in, 128 out."""
    ids = IdRange.below(vocabulary)
    return random_requests(num_requests, PROMPT, OUTPUT, seed=seed, ids=ids)


async def load(
    url: str, streams: int, requests: Sequence[BenchRequest], *, text: bool
) -> ServeSummary:
    """Keep so many streams running."""
    server = ServerOptions(skip_tokenizer_init=not text)
    fields = request_fields(server, SamplingOptions(), "", ignore_eos=True)
    with closing(HttpClient(url, {})) as http:
        client = OpenAIClient(
            http=http, path=COMPLETIONS, is_chat=False, fields=fields, tokenizer=None, timeout=600
        )
        return await send_all(
            requests,
            [0.0] * len(requests),
            client.stream,
            max_concurrency=streams,
            on_done=lambda: None,
        )


def report(args: argparse.Namespace) -> Iterator[str]:
    """Measure, and say what came out."""
    with server(args) as (processes, url):
        processes["client"] = os.getpid()
        uvloop.run(load(url, args.streams, work(args.streams, seed=0), text=args.text))  # warm up
        before = {name: busy_seconds(process) for name, process in processes.items()}
        steps = metric(url, "paged:num_steps_total")
        requests = work(args.rounds * args.streams, seed=1)
        summary = uvloop.run(load(url, args.streams, requests, text=args.text))
        steps = metric(url, "paged:num_steps_total") - steps
        after = {name: busy_seconds(process) for name, process in processes.items()}
    assert not summary.failures, summary.failures
    num_chunks = sum(len(record.chunk_times) for record in summary.records)
    num_tokens = sum(record.num_output_tokens for record in summary.records)
    yield (
        f"{num_chunks / summary.duration:,.0f} chunks/s of {num_tokens / num_chunks:.2f} tokens, "
        f"{len(summary.records) / summary.duration:.1f} requests/s, "
        f"device busy {steps * args.step_ms / 1e3 / summary.duration:.0%}"
    )
    for name, last in after.items():
        seconds = [last[thread] - before[name].get(thread, 0.0) for thread in last]
        costs = [1e6 * each / num_chunks for each in seconds]
        threads = " + ".join(f"{cost:.1f}" for cost in costs if cost > 0.05)
        yield f"  {name:8} {sum(costs):6.1f} us a chunk   by thread: {threads}"


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=2, help="requests of each stream")
    parser.add_argument("--text", action="store_true", help="stream text, not token ids")
    parser.add_argument("--no-engine-process", action="store_true", help="all in the server's")
    args = parser.parse_args()
    allow_many_connections()
    print("\n".join(report(args)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        sys.exit(run_server(*sys.argv[2:]))
    if sys.argv[1:2] == ["--engine"]:
        sys.exit(run_engine(*sys.argv[2:]))
    main()
