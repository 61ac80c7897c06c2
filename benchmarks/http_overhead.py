"""What HTTP costs at full load: the same closed loop offline and over HTTP, on one engine.

    python benchmarks/http_overhead.py benchmarks/models/llama-3.1-8b [--json FILE]
    python benchmarks/http_overhead.py --step-ms 10 [--text]

Requests of 300 tokens in and 128 out, so many at a time: when one ends, the next begins. The engine
process does them by itself first, with nobody around it; then it serves, and as many come from a
client in a process of its own, through `paged serve`. Prompts differ, so that nothing is found in
the prefix cache. Three figures come out:

- output tokens per second, both ways, and their ratio;
- the delivery of a token, from the moment the device's result is read to the moment its bytes are
  handed to the socket (the server's own `paged:token_delivery_seconds`): P50 and P99;
- processor time of engine process, server and client for each streamed chunk.

MODEL is a folder with a config.json (weights are random, token ids in and out). With --step-ms the
device is a clock (`device_clock.py`), which needs no GPU, and the model is the embedded one, of
which --text streams what its tokens say. Other flags go to `paged serve`, as --flag=value.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Timer
from unittest.mock import patch

import msgspec
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.device_clock import VOCABULARY, Clock
from benchmarks.offline_baselines import add
from benchmarks.serving_path import load, work
from paged.http import start
from paged.http.cli import main as paged
from paged.models.loading import resolve_model
from paged.runtime import engine
from paged.runtime.bench.serve import allow_many_connections
from paged.runtime.bench.workloads import BenchRequest
from paged.runtime.config import EngineConfig
from paged.runtime.engine import LoadedCore
from paged.runtime.engine_process import ServedCore, load_core
from paged.runtime.engine_process import main as serve_core
from paged.runtime.remote_core import RemoteCore

OFFLINE = "Offline:"


class Loop(msgspec.Struct, frozen=True):
    """A closed loop.

    Attributes:
        streams: requests at a time.
        rounds: requests of each stream.
        step_ms: of a device that is a clock; 0 for a real one.
        vocabulary: token ids are below it.
    """

    streams: int
    rounds: int
    step_ms: float
    vocabulary: int

    def requests(self, seed: int, rounds: int | None = None) -> list[BenchRequest]:
        num_requests = self.streams * (rounds or self.rounds)
        return work(num_requests, seed=seed, vocabulary=self.vocabulary)


@dataclass(frozen=True)
class Overhead:
    """What came out: tokens per second, milliseconds of delivery, microseconds a chunk.

    Attributes:
        chunks: streamed ones per second. A server that cannot keep up puts more tokens in each.
    """

    offline: float
    http: float
    ratio: float
    chunks: float
    delivery_p50: float
    delivery_p99: float
    costs: dict[str, float]

    def lines(self) -> Iterator[str]:
        """A table in Markdown."""
        yield "| | |"
        yield "| --- | --- |"
        yield f"| offline, output tok/s | {self.offline:,.0f} |"
        yield f"| over HTTP, output tok/s | {self.http:,.0f} |"
        yield f"| over HTTP / offline | {self.ratio:.3f} |"
        yield f"| chunks/s | {self.chunks:,.0f} |"
        yield f"| tokens in a chunk | {self.http / self.chunks:.2f} |"
        yield f"| delivery of a token, P50, ms | {self.delivery_p50:.2f} |"
        yield f"| delivery of a token, P99, ms | {self.delivery_p99:.2f} |"
        for name, cost in self.costs.items():
            yield f"| {name}, us a chunk | {cost:.1f} |"


def run_offline(core: LoadedCore, loop: Loop) -> float:
    """Output tokens per second of the closed loop, the engine alone."""
    for warm_up in (True, False):
        waiting = iter(enumerate(loop.requests(seed=int(warm_up), rounds=1 if warm_up else None)))
        num_tokens, start = 0, time.perf_counter()
        for _ in range(loop.streams):
            _add_next(core, waiting)
        while core.has_work:
            for item in core.step():
                num_tokens += len(item.token_ids)
                if item.finish_reason is not None:
                    _add_next(core, waiting)
        seconds = time.perf_counter() - start
    return num_tokens / seconds


def _add_next(core: LoadedCore, waiting: Iterator[tuple[int, BenchRequest]]) -> None:
    for number, request in waiting:
        add(core, f"offline-{number}", request)
        return


def run_engine(loop_json: str, descriptor: str) -> int:
    """The engine process: alone first, then as the server's."""
    loop = msgspec.json.decode(loop_json, type=Loop)

    def make_core(config: EngineConfig) -> ServedCore:
        core = Clock(loop.step_ms / 1e3) if loop.step_ms else load_core(config)
        print(OFFLINE, run_offline(core, loop), flush=True)
        core.reset_prefix_cache()
        return core

    return serve_core(int(descriptor), make_core)


def run_server(loop_json: str, *flags: str) -> int:
    """`paged serve`, but for the program of its engine process."""
    program = (__file__, "--engine", loop_json)
    core = partial(RemoteCore, program=program)
    with patch.object(engine, "RemoteCore", core), patch.object(start, "RemoteCore", core):
        return paged(["serve", *flags])


@contextmanager
def server(loop: Loop, args: argparse.Namespace) -> Iterator[tuple[psutil.Process, float, str]]:
    """A server that is ready: its process, tokens per second of its engine alone, its address."""
    flags = ["--host=127.0.0.1", "--port=0", "--disable-uvicorn-access-log", *args.serve]
    if not args.step_ms:
        flags = [args.model, "--load-format=dummy", f"--max-model-len={args.max_model_len}", *flags]
    if not args.text:
        flags.append("--skip-tokenizer-init")
    command = [sys.executable, __file__, "--server", msgspec.json.encode(loop).decode(), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = Timer(args.seconds, process.terminate)
    deadline.start()
    try:
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        offline = next((line for line in lines if line.startswith(OFFLINE)), None)
        ready = next(filter(None, (re.match(r"Ready: .* at (http\S+)/v1", x) for x in lines)), None)
        assert offline, f"the engine has not run: exit status {process.wait()}"
        assert ready, f"the server ended with exit status {process.wait()}"
        yield psutil.Process(process.pid), float(offline.removeprefix(OFFLINE)), ready[1]
    finally:
        deadline.cancel()
        process.terminate()
        process.wait()


def deliveries(url: str) -> dict[float, float]:
    """Tokens whose delivery took at most so many seconds, so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    bucket = r'^paged:token_delivery_seconds_bucket{.*le="([^"]+)".*} (\S+)$'
    found = re.findall(bucket, text, re.MULTILINE)
    return {float(bound): float(count) for bound, count in found}


def quantile(counts: dict[float, float], share: float) -> float:
    """The bound below which that share of all values lies, linear within a bucket."""
    wanted, low, below = share * counts[float("inf")], 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted:
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    raise AssertionError("the last bucket holds all values")


def busy(processes: Mapping[str, Sequence[psutil.Process]]) -> dict[str, float]:
    """Seconds on a processor of each kind of process."""
    times = {name: [each.cpu_times() for each in group] for name, group in processes.items()}
    return {name: sum(each.user + each.system for each in group) for name, group in times.items()}


def measure(args: argparse.Namespace) -> Overhead:
    """One engine: offline, then over HTTP."""
    vocabulary = VOCABULARY
    if args.model:
        vocabulary = resolve_model(args.model, load_format="dummy").config.vocab_size
    loop = Loop(args.streams, args.rounds, args.step_ms, vocabulary)
    with server(loop, args) as (process, offline, url):
        children = process.children()
        [core] = [each for each in children if "--engine" in each.cmdline()]
        servers = [process, *(each for each in children if each != core)]
        processes = {"engine": [core], "server": servers, "client": [psutil.Process(os.getpid())]}
        uvloop.run(load(url, args.streams, loop.requests(seed=2, rounds=1), text=args.text))
        delivered, spent = deliveries(url), busy(processes)
        summary = uvloop.run(load(url, args.streams, loop.requests(seed=3), text=args.text))
        costs = {name: seconds - spent[name] for name, seconds in busy(processes).items()}
        delivered = {bound: n - delivered[bound] for bound, n in deliveries(url).items()}
    assert not summary.failures, summary.failures
    http = sum(record.num_output_tokens for record in summary.records) / summary.duration
    num_chunks = sum(len(record.chunk_times) for record in summary.records)
    return Overhead(
        offline=offline,
        http=http,
        ratio=http / offline,
        chunks=num_chunks / summary.duration,
        delivery_p50=1e3 * quantile(delivered, 0.5),
        delivery_p99=1e3 * quantile(delivered, 0.99),
        costs={name: 1e6 * seconds / num_chunks for name, seconds in costs.items()},
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", help="folder with a config.json")
    parser.add_argument("--step-ms", type=float, default=0.0, help="of a clock in its place")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6, help="requests of each stream")
    parser.add_argument("--text", action="store_true", help="stream text, not token ids")
    parser.add_argument("--seconds", type=float, default=150, help="for everything")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args, others = parser.parse_known_args()
    args.serve = others
    if bool(args.model) == bool(args.step_ms):
        parser.error("give either MODEL or --step-ms")
    return args


def main() -> None:
    """Measure, print the table and keep the figures."""
    args = _arguments()
    allow_many_connections()
    overhead = measure(args)
    print("\n".join(overhead.lines()))
    if args.json:
        args.json.write_text(json.dumps(asdict(overhead), indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        sys.exit(run_server(*sys.argv[2:]))
    if sys.argv[1:2] == ["--engine"]:
        sys.exit(run_engine(*sys.argv[2:]))
    main()
