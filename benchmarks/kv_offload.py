"""Conversations with more KV than the device holds: what pages in host memory are good for.

    python benchmarks/kv_offload.py MODEL --kv-cache-memory-gib 8 --kv-offloading-size 32 \\
        --conversations 64 --seconds 30 [--json FILE]

First, how fast pages go to the host and come back, and how much of that time the engine's thread is
busy with it. Then conversations whose turns take turns, `--streams` at a time, so that much of each
has left the device when it goes on: without host pages, with them, and with all of them loaded
whatever it costs. Each case begins with a first turn of every conversation, which is not timed, and
goes on for `--seconds`. Told are turns and tokens per second, the time to first token, how much of
the prompts was found on the device and how much on the host, and the bytes moved. Token ids,
greedy, random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.offline_baselines import add, add_engine_arguments, engine_config
from paged.host_pages import HostPages, PageMove
from paged.models.loading import resolve_model
from paged.runtime.bench.workloads import BenchRequest
from paged.runtime.core import EngineCore
from paged.runtime.load_costs import FREE

GIB = 2**30
MOST_MOVED = 1024
CASES = ("no host pages", "host pages", "all loaded")


@dataclass(frozen=True)
class Transfer:
    """Pages moved one way, all at once.

    Attributes:
        gigabytes: moved.
        gb_per_s: until all had arrived.
        busy: share of that time in which the engine's thread was enqueuing.
    """

    direction: str
    gigabytes: float
    gb_per_s: float
    busy: float


@dataclass(frozen=True)
class Result:
    """One case; see the module.

    Attributes:
        ttft_ms: median and 99th percentile.
        computed, on_device, on_host: shares of the prompts' tokens.
    """

    case: str
    turns: int
    turns_per_s: float
    output_tokens_per_s: float
    ttft_ms: tuple[float, float]
    computed: float
    on_device: float
    on_host: float
    gb_saved: float
    gb_loaded: float
    preemptions: int
    compiles: int


class Conversations:
    """Conversations that wait for their next turn, the longest waiting first."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self._args = args
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self._waiting = deque(self._words(args.prompt) for _ in range(args.conversations))
        self._talking: dict[str, list[int]] = {}
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def next_turn(self) -> tuple[str, BenchRequest]:
        """A request, by its name; a conversation that has become too long begins anew."""
        said = self._waiting.popleft()
        if len(said) + self._args.output > self._args.max_model_len:
            said = self._words(self._args.prompt)
        self._num_turns += 1
        name = f"turn-{self._num_turns}"
        self._talking[name] = said
        return name, BenchRequest(list(said), len(said), self._args.output)

    def answer(self, name: str, tokens: list[int]) -> None:
        """Take in a part of an answer."""
        self._talking[name] += tokens

    def end_turn(self, name: str) -> None:
        """The user goes on, in the next turn."""
        self._waiting.append(self._talking.pop(name) + self._words(self._args.turn))

    def _words(self, count: int) -> list[int]:
        return list(map(int, self._random.integers(0, self._vocab_size, count)))


def transfers(core: EngineCore) -> Iterator[Transfer]:
    """Move free pages to the host and back."""
    assert core.reset_prefix_cache(), "pages are free"
    store, num_pages = core._runner.host, core.memory.num_pages - 1
    count = min(MOST_MOVED, num_pages, core.memory.num_host_pages)
    gigabytes = count * core.memory.bytes_per_host_page / 1e9
    for to_host in (True, False):
        moves = [PageMove(1 + number, number, to_host, b"") for number in range(count)]
        jax.block_until_ready(core._runner._device.cache)
        start = time.perf_counter()
        core._runner._device.cache = store.move(core._runner._device.cache, moves)
        enqueued = time.perf_counter()
        kept = [store._places[number].stack for number in range(count)]
        jax.block_until_ready((core._runner._device.cache, kept))
        seconds = time.perf_counter() - start
        busy = (enqueued - start) / seconds
        direction = "to the host" if to_host else "from the host"
        yield Transfer(
            direction, round(gigabytes, 3), round(gigabytes / seconds, 2), round(busy, 2)
        )


@contextmanager
def arranged(core: EngineCore, case: str) -> Iterator[None]:
    """Meanwhile the engine treats host pages as the case says, which it finds empty."""
    assert core.reset_prefix_cache(), "nothing runs"
    tables, pool = core._scheduler._tables, core._pool
    costs = FREE if case == "all loaded" else tables._load_costs
    host = HostPages() if case == "no host pages" else pool.host
    with patch.object(tables, "_load_costs", costs), patch.object(pool, "host", host):
        yield
        core.reset_prefix_cache()


def talk(
    core: EngineCore, conversations: Conversations, streams: int, *, turns: int, until: float
) -> list[float]:
    """Begin so many turns at most, all before a time, and end them; their times to first token."""
    begun: dict[str, float] = {}
    ttft: dict[str, float] = {}
    num_talking = 0
    while True:
        while num_talking < streams and len(begun) < turns and len(conversations):
            if time.perf_counter() > until:
                break
            name, request = conversations.next_turn()
            add(core, name, request)
            begun[name] = time.perf_counter()
            num_talking += 1
        if not core.has_work:
            return list(ttft.values())
        for news in core.step():
            name = news.request_id
            ttft.setdefault(name, time.perf_counter() - begun[name])
            conversations.answer(name, news.token_ids)
            if news.finish_reason:
                num_talking -= 1
                conversations.end_turn(name)


def measure(core: EngineCore, case: str, args: argparse.Namespace) -> Result:
    """Run one case."""
    conversations = Conversations(args, core.vocab_size)
    with arranged(core, case):
        talk(core, conversations, args.streams, turns=args.conversations, until=float("inf"))
        before, start = core.stats(), time.perf_counter()
        until = start + args.seconds
        ttft = talk(core, conversations, args.streams, turns=10**9, until=until)
        seconds, after = time.perf_counter() - start, core.stats()
    num_prompt = after.prefix_cache_queries - before.prefix_cache_queries
    on_device = (after.prefix_cache_hits - before.prefix_cache_hits) / num_prompt
    on_host = (after.host_hits - before.host_hits) / num_prompt
    p50, p99 = 1e3 * np.percentile(ttft, (50, 99))
    return Result(
        case=case,
        turns=len(ttft),
        turns_per_s=round(len(ttft) / seconds, 2),
        output_tokens_per_s=round(len(ttft) * args.output / seconds, 1),
        ttft_ms=(round(p50, 1), round(p99, 1)),
        computed=round(1 - on_device - on_host, 3),
        on_device=round(on_device, 3),
        on_host=round(on_host, 3),
        gb_saved=round((after.host_bytes_saved - before.host_bytes_saved) / 1e9, 2),
        gb_loaded=round((after.host_bytes_loaded - before.host_bytes_loaded) / 1e9, 2),
        preemptions=after.num_preemptions - before.num_preemptions,
        compiles=after.compiles_after_warmup,
    )


def results(args: argparse.Namespace) -> Iterator[Transfer | Result]:
    """Everything, as it is measured."""
    source = resolve_model(args.model, load_format="dummy")
    config = replace(
        engine_config(args),
        kv_offloading_size=args.kv_offloading_size,
        kv_cache_memory_bytes=int(args.kv_cache_memory_gib * GIB),
    )
    core = EngineCore(config, source, progress=False)
    memory = core.memory
    num_tokens = args.conversations * args.prompt
    print(
        f"{args.conversations} conversations begin with {num_tokens:,} tokens; the device holds "
        f"{memory.num_tokens:,}, the host {memory.num_host_tokens:,}. "
        f"{core._scheduler.config.load_costs.report(memory.bytes_per_host_page)}",
        flush=True,
    )
    yield from transfers(core)
    for case in args.cases.split(","):
        yield measure(core, case, args)
    core.close()


def main() -> None:
    """Measure, and print a line of JSON per figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add_engine_arguments(parser)
    parser.add_argument("--kv-cache-memory-gib", type=float, default=8.0, help="on the device")
    parser.add_argument("--kv-offloading-size", type=float, default=32.0, help="GiB on the host")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--streams", type=int, default=16, help="turns at a time")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a first turn")
    parser.add_argument("--turn", type=int, default=200, help="tokens of each further turn")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each case")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if unknown := set(args.cases.split(",")) - set(CASES):
        parser.error(f"--cases knows {', '.join(CASES)}; got {', '.join(sorted(unknown))}")
    told = []
    for figure in results(args):
        print(json.dumps(asdict(figure)), flush=True)
        told.append(asdict(figure))
        if args.json:
            args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
