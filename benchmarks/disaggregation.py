"""Steady streams while long prompts come: one engine, or one for prompts and one for streams.

    python benchmarks/disaggregation.py [MODEL] --streams 4 --prompt 1024 --seconds 30 [--json FILE]

Both cases have the same two halves of a machine's cores: one engine on all of them, or a prefill
engine on one half and a decode engine on the other, each a process. Streams decode without end;
every `--every` seconds a long prompt of its own comes and is answered by `--output` tokens. Told
are the time between two tokens of a stream, the time to the first token of a long prompt, and of
what is handed over: bytes, bytes a second while a prompt is waited for, and by how much an idle
pair takes longer than its prefill engine alone, which is what does not overlap with computing.
Token ids, greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams

CASES = ("one engine", "two engines")
_TIME_TO_CONNECT = 60.0
_FEWEST_TOKENS = 64  # of a prompt by which an engine is warmed up


@dataclass(frozen=True)
class Result:
    """One case; see the module.

    Attributes:
        itl_ms: 50th and 99th percentile, and the largest.
        ttft_ms: median and largest.
        handed_over: megabytes of pages.
        mb_per_s: of them, while prompts were waited for.
        prompts: by the outcome of asking for them.
    """

    case: str
    output_tokens_per_s: float
    itl_ms: tuple[float, float, float]
    ttft_ms: tuple[float, float]
    num_long: int
    handed_over: float
    mb_per_s: float
    prompts: dict[str, int]


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Have processes that are started meanwhile run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def engines(case: str, args: argparse.Namespace) -> Iterator[list[AsyncEngine]]:
    """The one that is asked first, and perhaps the one that computes prompts for it."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    flags: dict[str, Any] = {
        "max_num_batched_tokens": args.chunk,
        "max_num_seqs": args.streams + 4,
        "max_model_len": args.max_model_len,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
        "kv_offloading_size": args.kv_offloading_size,
        "load_format": args.load_format,
        "skip_tokenizer_init": True,
    }
    with ExitStack() as stack:

        def start(where: list[int], **more: Any) -> AsyncEngine:
            with on_cores(set(where)):
                engine = AsyncEngine(args.model, separate_process=True, **flags, **more)
            stack.callback(engine.shutdown)
            return engine

        if case == CASES[0]:
            yield [start(cores)]
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        prefill = start(cores[:half], kv_transfer_port=port)
        least = min(args.prompt // 2, 512)
        asking = {"prefill_servers": (f"127.0.0.1:{port}",), "min_remote_prefill_tokens": least}
        yield [start(cores[half:], **asking), prefill]


async def answer(engine: AsyncEngine, prompt: list[int], max_tokens: int) -> list[float]:
    """When each token came."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    times = []
    async for output in engine.generate({"prompt_token_ids": prompt}, params):
        times += [time.perf_counter()] * len(output.outputs[0].token_ids)
    return times


async def stream(engine: AsyncEngine, prompt: list[int], length: int, until: float) -> list[float]:
    """Seconds between tokens of one answer after the other."""
    gaps = list[float]()
    while time.perf_counter() < until:
        gaps += np.diff(await answer(engine, prompt, length)).tolist()
    return gaps


async def long_prompt(engine: AsyncEngine, prompt: list[int], output: int) -> float:
    """Seconds to its first token."""
    started = time.perf_counter()
    return (await answer(engine, prompt, output))[0] - started


async def measure(case: str, args: argparse.Namespace, running: list[AsyncEngine]) -> Result:
    """The mix, for `--seconds`."""
    engine, rng = running[0], np.random.default_rng(0)

    def words(count: int) -> list[int]:
        return [int(each) for each in rng.integers(100, args.vocabulary, count)]

    await warm_up(running, words(args.prompt))
    before, until = engine.stats().transfer, time.perf_counter() + args.seconds
    streams = [
        asyncio.create_task(stream(engine, words(16), args.stream_length, until))
        for _ in range(args.streams)
    ]
    await asyncio.sleep(args.every / 2)
    asked = []
    while time.perf_counter() < until - args.every:
        asked.append(asyncio.create_task(long_prompt(engine, words(args.prompt), args.output)))
        await asyncio.sleep(args.every)
    first = 1000 * np.array(await asyncio.gather(*asked))
    gaps = 1000 * np.concatenate(await asyncio.gather(*streams))
    after = engine.stats().transfer
    p50, p99 = map(float, np.percentile(gaps, (50, 99)))
    seconds, received = after.seconds - before.seconds, after.bytes_received - before.bytes_received
    return Result(
        case,
        output_tokens_per_s=1000 * args.streams / float(gaps.mean()),
        itl_ms=(p50, p99, float(gaps.max())),
        ttft_ms=(float(np.median(first)), float(first.max())),
        num_long=len(first),
        handed_over=received / 1e6,
        mb_per_s=received / 1e6 / seconds if seconds else 0.0,
        prompts={
            name: count - before.outcomes.get(name, 0)
            for name, count in after.outcomes.items()
            if count > before.outcomes.get(name, 0)
        },
    )


async def warm_up(running: list[AsyncEngine], prompt: list[int]) -> None:
    """Run each engine once, and wait until a prompt is handed over."""
    for engine in running:
        await answer(engine, prompt[:_FEWEST_TOKENS], 2)
    end = time.perf_counter() + _TIME_TO_CONNECT
    while len(running) > 1 and not running[0].stats().transfer.outcomes["done"]:
        if time.perf_counter() > end:
            raise SystemExit("the prefill engine computes nothing for the decode engine")
        prompt = [*prompt[1:], prompt[0]]
        await answer(running[0], prompt, 1)


async def time_alone(args: argparse.Namespace, running: list[AsyncEngine]) -> tuple[float, float]:
    """Milliseconds of a long prompt: on an idle prefill engine, and from it by an idle pair."""
    rng = np.random.default_rng(1)
    found = []
    for engine in (running[1], running[0]):
        prompts = [rng.integers(100, args.vocabulary, args.prompt).tolist() for _ in range(5)]
        found.append(1000 * np.median([await long_prompt(engine, each, 1) for each in prompts]))
    return float(found[0]), float(found[1])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="default the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-length", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a long prompt")
    parser.add_argument("--output", type=int, default=8, help="tokens that answer it")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two of them")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--chunk", type=int, default=256, help="most tokens in a step")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=2**30)
    parser.add_argument("--kv-offloading-size", type=float, default=1.0, metavar="GIB")
    parser.add_argument("--load-format", default="auto", help="dummy for random weights")
    parser.add_argument("--vocabulary", type=int, default=40_000, help="token ids are below it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results, alone = [], (0.0, 0.0)
    for case in CASES:
        with engines(case, args) as running:
            result = asyncio.run(measure(case, args, running))
            if len(running) > 1:
                alone = asyncio.run(time_alone(args, running))
        results.append(result)
        print(report(result), flush=True)
    print(
        f"idle: {alone[0]:.0f} ms for a prompt on the prefill engine, {alone[1]:.0f} by both: "
        f"{alone[1] - alone[0]:+.0f} ms for handing over, loading and the last tokens"
    )
    if args.json:
        told = {"results": [asdict(each) for each in results], "alone_ms": alone}
        args.json.write_text(json.dumps(told, indent=1))


def report(result: Result) -> str:
    """A line."""
    p50, p99, most = result.itl_ms
    median, worst = result.ttft_ms
    return (
        f"{result.case:12} {result.output_tokens_per_s:6.1f} tokens/s of streams; between tokens "
        f"{p50:.0f} ms (P50), {p99:.0f} (P99), {most:.0f} (most); first token of "
        f"{result.num_long} long prompts {median:.0f} ms (median), {worst:.0f} (most); handed over "
        f"{result.handed_over:.0f} MB at {result.mb_per_s:.0f} MB/s; {result.prompts}"
    )


if __name__ == "__main__":
    main()
