"""A server under clients of every sort, for as long as is wanted: what goes missing, what grows?

    python benchmarks/soak.py --minutes 30 [--model FOLDER] [-- flags of paged serve]

Requests come at random: of all lengths, streamed or not, broken off, or wrong in every way. The
engine process is killed now and then during the first two thirds. In the end, with nothing left to
do, the exit status is 1 unless

- every request was answered, or failed with a reason in words;
- no page, connection, thread or file descriptor is left over;
- the memory of no process has grown since the first third;
- what the server has counted is what the clients have seen.

Without --model it is a tiny one with random weights, which a CPU runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
FLAGS = (
    *("--load-format=dummy", "--skip-tokenizer-init", "--max-num-seqs=8"),
    *("--max-num-batched-tokens=64", "--kv-cache-memory-bytes=1m", "--block-size=16"),
)
ALWAYS = ("--host=127.0.0.1", "--served-model-name=m", "--disable-uvicorn-access-log")
RESTARTS = "--max-engine-restarts=1000"
WRONG: tuple[tuple[int, bytes], ...] = (
    (400, b"{"),
    (400, b"[]"),
    (400, b'{"prompt": 7}'),
    (400, b'{"prompt": [1, 2], "max_tokens": 100000}'),
    (400, b'{"prompt": [-1]}'),
    (400, b'{"prompt": [1], "temperature": -1}'),
    (400, b"[" * 100_000),
    (404, b'{"prompt": [1], "model": "no such model"}'),
)
_MIB = 2**20
_SAMPLE_EVERY = 0.5
_FEWEST_SAMPLES = 60
_RESTARTS = "paged:engine_restarts"


@dataclass
class Seen:
    """What clients have seen.

    Attributes:
        statuses: replies by status, of requests that were not broken off.
        answered, failed: requests that were answered in full, and that failed in words.
        left: requests that were broken off.
        unclear: what should not have happened.
        kills: how often the engine process was killed.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    answered: int = 0
    failed: int = 0
    left: int = 0
    kills: int = 0
    unclear: list[str] = field(default_factory=list)


class Watched:
    """The server's processes, and what they hold.

    Attributes:
        is_ready: whether its engine runs; one that starts is expected to grow.
    """

    def __init__(self, pid: int) -> None:
        self.server = psutil.Process(pid)
        self.is_ready = True
        self.samples: list[dict[int, tuple[int, int, int]]] = []

    def engine(self) -> psutil.Process | None:
        """The youngest engine process, whatever program it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in reversed(self.server.children()):
                argv = child.cmdline()  # such processes are told a descriptor last
                if "paged.http.api_process" not in argv and argv[-1:] != [] and argv[-1].isdigit():
                    return child
        return None

    def sample(self) -> None:
        """Take down memory, descriptors and threads of each process."""
        found = {}
        for process in (self.server, *(self.server.children() if self.is_ready else ())):
            with contextlib.suppress(psutil.NoSuchProcess):
                rss = process.memory_info().rss
                found[process.pid] = (rss, process.num_fds(), process.num_threads())
        self.samples.append(found)

    def growth(self) -> list[str]:
        """What has become more since the first third, of processes that are still there."""
        found = []
        for pid in self.samples[-1]:
            of_process = [sample[pid] for sample in self.samples if pid in sample]
            if len(of_process) < _FEWEST_SAMPLES:
                continue
            early = of_process[len(of_process) // 3 : len(of_process) // 3 + 5]
            late = of_process[-5:]
            names = ("bytes of memory", "file descriptors", "threads")
            for name, before, after, slack in zip(
                names, zip(*early, strict=True), zip(*late, strict=True), (0, 8, 8), strict=True
            ):
                first, last = statistics.median(before), statistics.median(after)
                allowed = first + slack if slack else first * 1.1 + 16 * _MIB
                if last > allowed:
                    found.append(f"process {pid} had {first:g} {name}, and has {last:g}")
        return found


class Clients:
    """Clients of one server, who do as they like.

    Args:
        root: where the server is.
        longest: tokens of a prompt and its answer together.
        vocab_size: prompts hold ids below it.
    """

    def __init__(self, root: str, seed: int, longest: int, vocab_size: int) -> None:
        self.seen = Seen()
        self._random = random.Random(seed)
        self._longest, self._vocab_size = longest, vocab_size
        limits = httpx2.Limits(max_connections=None)
        self._http = httpx2.AsyncClient(base_url=root, timeout=120, limits=limits)

    async def run(self, num_clients: int, until: float) -> None:
        """Have clients ask until some time, `time.monotonic`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._ask_until(until))

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> httpx2.Response:
        return await self._http.get(path)

    async def _ask_until(self, until: float) -> None:
        acts = (self._whole, self._stream, self._leave, self._leave_stream, self._wrong)
        while time.monotonic() < until:
            [act] = self._random.choices(acts, (4, 4, 1, 2, 2))
            try:
                await act()
            except httpx2.HTTPError as error:
                self.seen.unclear.append(f"{act.__name__}: {type(error).__name__}: {error}")
            await asyncio.sleep(self._random.expovariate(20))

    def _request(self, **more: object) -> dict[str, object]:
        draw = self._random
        length = draw.choice((1, 2, 15, 16, 17, draw.randrange(1, self._longest // 2)))
        shared = draw.random() < 0.5  # half of the prompts begin alike
        prompt = [
            2 + (place if shared else draw.randrange(self._vocab_size)) % (self._vocab_size - 2)
            for place in range(length)
        ]
        n, temperature = draw.choice(((1, 0), (1, 1), (2, 1)))
        sampling = {"n": n, "temperature": temperature, "top_p": draw.choice((1, 0.9))}
        limits = {"max_tokens": draw.randrange(1, self._longest - length), "ignore_eos": True}
        return {"prompt": prompt, **sampling, **limits, **more}

    async def _whole(self) -> None:
        reply = await self._http.post("/v1/completions", json=self._request())
        self.seen.statuses[reply.status_code] += 1
        if reply.status_code == 200 and reply.json()["choices"][0]["finish_reason"] == "length":
            self.seen.answered += 1
        else:
            self._failed(reply.status_code, reply.text)

    async def _stream(self) -> None:
        asked = self._request(stream=True)
        async with self._http.stream("POST", "/v1/completions", json=asked) as reply:
            text = (await reply.aread()).decode()
        self.seen.statuses[reply.status_code] += 1
        if reply.status_code != 200:
            self._failed(reply.status_code, text)
            return
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        if events[-1:] != ["[DONE]"]:
            self.seen.unclear.append(f"a stream ended with {text[-200:]!r}")
        elif '"error"' in events[-2]:
            self._failed(500, events[-2])
        else:
            self.seen.answered += 1

    async def _leave(self) -> None:
        self.seen.left += 1
        with contextlib.suppress(httpx2.TimeoutException):
            soon = self._random.uniform(0.05, 0.5)
            await self._http.post("/v1/completions", json=self._request(), timeout=soon)

    async def _leave_stream(self) -> None:
        self.seen.left += 1
        num_lines = self._random.randrange(1, 20)
        asked = self._request(stream=True)
        async with self._http.stream("POST", "/v1/completions", json=asked) as reply:
            async for _ in reply.aiter_lines():
                num_lines -= 1
                if not num_lines:
                    break

    async def _wrong(self) -> None:
        status, body = self._random.choice(WRONG)
        headers = {"Content-Type": "application/json"}
        reply = await self._http.post("/v1/completions", content=body, headers=headers)
        self.seen.statuses[reply.status_code] += 1
        if reply.status_code not in (status, 503):
            self.seen.unclear.append(f"{body[:50]!r} got {reply.status_code}: {reply.text[:200]}")
        elif reply.status_code == 503:
            self.seen.failed += 1

    def _failed(self, status: int, text: str) -> None:
        with contextlib.suppress(ValueError, LookupError):
            if status in (500, 503) and json.loads(text)["error"]["message"]:
                self.seen.failed += 1
                return
        self.seen.unclear.append(f"{status}: {text[:300]}")


async def soak(
    root: str, server: int, options: argparse.Namespace, *, longest: int, vocab_size: int
) -> tuple[Seen, list[str]]:
    """Let clients loose on a server; what they have seen, and what is wrong.

    Args:
        root: where it is.
        server: its process.
    """
    clients = Clients(root, options.seed, longest, vocab_size)
    watched = Watched(server)
    seconds = options.minutes * 60
    start = time.monotonic()
    sampler = asyncio.create_task(_sample(watched))
    until = start + seconds * 2 / 3
    killer = asyncio.create_task(_kill(clients, watched, options.kill_every, until))
    await clients.run(options.clients, start + seconds)
    await killer
    sampler.cancel()
    await _until_idle(clients)
    await asyncio.sleep(1)  # connections that were broken off are noticed
    for _ in range(5):
        watched.sample()
    metrics = (await clients.get("/metrics")).text
    wrong = [*clients.seen.unclear[:10], *watched.growth(), *_leftovers(metrics)]
    wrong += _miscounted(metrics, clients.seen)
    if (await clients.get("/health")).status_code != 200:
        wrong.append("the server is not healthy")
    if load := (await clients.get("/load")).json()["server_load"]:
        wrong.append(f"{load} requests are still being answered")
    await clients.close()
    return clients.seen, wrong


async def _sample(watched: Watched) -> None:
    while True:
        watched.sample()
        await asyncio.sleep(_SAMPLE_EVERY)


async def _kill(clients: Clients, watched: Watched, every: float, until: float) -> None:
    """End the engine process again and again, each time after it has come back."""
    while time.monotonic() + every < until:
        await asyncio.sleep(every)
        engine = watched.engine()
        if engine is not None and (await clients.get("/ready")).status_code == 200:
            os.kill(engine.pid, signal.SIGKILL)
            clients.seen.kills += 1
            watched.is_ready = False
            await _until_restarted(clients)
            watched.is_ready = True


async def _until_restarted(clients: Clients) -> None:
    """Until as many restarts are counted as kills: the server may be slow to notice one."""
    async with asyncio.timeout(300):
        while _sum((await clients.get("/metrics")).text, _RESTARTS) < clients.seen.kills:
            await asyncio.sleep(0.1)
    await _until_ready(clients)


async def _until_ready(clients: Clients) -> None:
    async with asyncio.timeout(300):
        while (await clients.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)


async def _until_idle(clients: Clients) -> None:
    await _until_ready(clients)
    with contextlib.suppress(TimeoutError):  # what is left then is told
        async with asyncio.timeout(30):
            while _sum((await clients.get("/metrics")).text, "vllm:num_requests_(running|waiting)"):
                await asyncio.sleep(0.1)
            while (await clients.get("/load")).json()["server_load"]:
                await asyncio.sleep(0.1)


def _sum(metrics: str, name: str, labels: str = "") -> float:
    """The sum of a family's samples that have these labels; both may be patterns."""
    pattern = rf"^(?:{name})(?:_total)?{{[^}}]*{labels}[^}}]*}} (?P<value>\S+)$"
    return sum(float(match["value"]) for match in re.finditer(pattern, metrics, re.MULTILINE))


def _leftovers(metrics: str) -> list[str]:
    found = []
    if left := _sum(metrics, "vllm:num_requests_(running|waiting)"):
        found.append(f"{left:g} sequences run or wait")
    pages = {name: _sum(metrics, f"paged:num_{name}pages") for name in ("", "free_", "cached_")}
    if pages[""] != pages["free_"] + pages["cached_"]:
        found.append(f"pages are lost: {pages}")
    return found


def _miscounted(metrics: str, seen: Seen) -> list[str]:
    """Where the server's counters and its clients disagree. Who left may count as anything, and as
    nothing if they did before the server looked.
    """
    handler = 'handler="/v1/completions"'
    counted = {
        "replies with 400": _sum(metrics, "http_requests", f'{handler}[^}}]*status="400"'),
        "replies with 404": _sum(metrics, "http_requests", f'{handler}[^}}]*status="404"'),
        "restarts": _sum(metrics, _RESTARTS),
    }
    expected = {
        "replies with 400": seen.statuses[400],
        "replies with 404": seen.statuses[404],
        "restarts": seen.kills,
    }
    found = [
        f"the server counts {counted[name]:g} {name}, its clients {expected[name]}"
        for name in counted
        if counted[name] != expected[name]
    ]
    bounded = {
        "requests": (_sum(metrics, "http_requests", handler), sum(seen.statuses.values())),
        "errors": (_sum(metrics, "vllm:request_success", 'finished_reason="error"'), seen.failed),
    }
    for name, (number, least) in bounded.items():
        if not least <= number <= least + seen.left:
            found.append(f"the server counts {number:g} {name}, its clients {least}")
    return found


@contextlib.asynccontextmanager
async def started(options: argparse.Namespace) -> AsyncIterator[tuple[str, int]]:
    """`paged serve` on a free port; its address and process."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(json.dumps(TINY))
        model = [options.model] if options.model else [str(folder), *FLAGS]
        cache = f"--compile-cache-dir={folder}/compiled"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        argv = [sys.executable, "-m", "paged.http", "serve", *model, *ALWAYS, RESTARTS, cache]
        process = subprocess.Popen([*argv, f"--port={port}", *options.flags])
        try:
            yield f"http://127.0.0.1:{port}", process.pid
            process.terminate()
            if status := process.wait(60):
                raise SystemExit(f"the server has left with status {status}")
        finally:
            process.kill()
            process.wait()  # before the folder goes that it works in


async def main(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    async with started(options) as (root, pid):
        async with asyncio.timeout(600):
            while not await _is_ready(root):
                await asyncio.sleep(0.2)
        longest, size = options.max_model_len, options.vocab_size
        seen, wrong = await soak(root, pid, options, longest=longest, vocab_size=size)
    replies = dict(sorted(seen.statuses.items()))
    print(f"{seen.answered} answered, {seen.failed} failed in words, {seen.left} left, {replies}")
    print(f"the engine was killed {seen.kills} times")
    for each in wrong:
        print(f"WRONG: {each}")
    return 1 if wrong else 0


async def _is_ready(root: str) -> bool:
    with contextlib.suppress(httpx2.HTTPError):
        async with httpx2.AsyncClient() as http:
            return (await http.get(f"{root}/ready")).status_code == 200
    return False


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--kill-every", type=float, default=120, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="folder; default a tiny one with random weights")
    parser.add_argument("--max-model-len", type=int, default=256, help="that of the model")
    parser.add_argument("--vocab-size", type=int, default=300, help="that of the model")
    parser.add_argument("flags", nargs="*", help="more flags of paged serve, behind --")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse())))
