"""How late a device's steps get while 256 streams are consumed, with the engine in the process that
serves them and in one of its own.

The device is a clock: a step takes so many milliseconds, starts when it is launched and the one
before it has ended, and gives every running sequence a token. All else is real: scheduling the next
step before reading the last, detokenising, the HTTP application that every stream runs through up
to the bytes it sends. Only sockets and clients are left out. A step is late by the time that the
device stood idle before it.

    python benchmarks/process_split.py --step-ms 5 10 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from starlette.applications import Starlette

from paged.http.app import create_app
from paged.models.loading import resolve_model
from paged.runtime import async_engine
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.config import EngineConfig
from paged.runtime.engine import Core, Engine
from paged.runtime.engine_process import main as serve_core
from paged.runtime.front import Front
from paged.runtime.memory import MemoryPlan
from paged.runtime.messages import EngineRequest, EngineStats, SequenceOutput
from paged.runtime.remote_core import RemoteCore
from paged.runtime.sampling_params import SamplingParams

MAX_MODEL_LEN, VOCABULARY = 2**20, 49_000
_WARM_UP_STEPS = 20
MEMORY = MemoryPlan(None, 0, 0, 0, 1, 1, 1, MAX_MODEL_LEN)


@dataclass
class Clock:
    """A core whose device is a clock. One token a step for each request, up to its max_tokens.

    Attributes:
        step_time: seconds.
        late: seconds that the device stood idle before each step.
    """

    step_time: float
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCABULARY
    memory: MemoryPlan = field(default_factory=lambda: MEMORY)
    late: list[float] = field(default_factory=list)
    _random: Random = field(default_factory=lambda: Random(0))
    _live: dict[str, int] = field(default_factory=dict)  # tokens to come
    _ends: list[float] = field(default_factory=list)  # of the steps in flight, oldest first
    _free_since: float | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def fileno(self) -> None:
        """No other process has news for `step`."""

    def add(self, request: EngineRequest) -> None:
        self._live[request.request_id] = request.params.max_tokens or 0

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        if self._live.pop(request_id, None) is None:
            return []
        return [SequenceOutput(request_id, 0, [], finish_reason="abort")]

    def step(self) -> list[SequenceOutput]:
        """Launch a step, then wait for the one before it."""
        now = time.perf_counter()
        starts = max(now, self._ends[-1]) if self._ends else now
        if self._free_since is not None:
            self.late.append(max(now - self._free_since, 0.0))
        self._ends.append(starts + self.step_time)
        self._free_since = self._ends[-1]
        if len(self._ends) == 1:
            return []
        time.sleep(max(self._ends.pop(0) - time.perf_counter(), 0))
        return [self._advance(*each, now) for each in list(self._live.items())]

    def _advance(self, name: str, num_left: int, now: float) -> SequenceOutput:
        """A sequence's next token."""
        self._live[name] = num_left - 1
        if num_left == 1:
            del self._live[name]
        token, reason = self._random.randrange(VOCABULARY), None if num_left > 1 else "length"
        return SequenceOutput(name, 0, [token], finish_reason=reason, first_scheduled_time=now)

    def stats(self) -> EngineStats:
        numbers: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0)
        return EngineStats(**numbers | {"num_steps": len(self.late)})

    def reset_prefix_cache(self) -> bool:
        return True

    def close(self) -> None:
        self._live.clear()


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        busy: share of the time in which the device worked.
        late: milliseconds that it stood idle before a step: median, 99th percentile.
        messages: pieces of the streams that were sent, per second.
    """

    busy: float
    late: tuple[float, float]
    messages: float


def measure(step_time: float, seconds: float, num_streams: int, *, split: bool) -> Result:
    """Consume the streams for some seconds."""
    front = Front(
        tokenizer=resolve_model(None).tokenizer(),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCABULARY,
        max_logprobs=0,
        default_params=SamplingParams(),
    )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "late.json"
        program = (__file__, "--clock", str(step_time), str(report))
        core: Core = RemoteCore(EngineConfig(), program=program) if split else Clock(step_time)
        with patch.object(async_engine, "load_engine", lambda *_, **how: Engine(core, front)):
            engine = AsyncEngine()
        num_messages = asyncio.run(_consume(create_app(engine, ["m"]), seconds, num_streams))
        engine.shutdown()
        late = json.loads(report.read_text()) if split else core.late
    late = [1e3 * each for each in late[_WARM_UP_STEPS:]]
    busy = 1e3 * step_time * len(late) / (1e3 * step_time * len(late) + sum(late))
    quantiles = statistics.quantiles(late, n=100)
    return Result(busy, (quantiles[49], quantiles[98]), num_messages / seconds)


async def _consume(app: Starlette, seconds: float, num_streams: int) -> int:
    """Messages that came of so many streams."""
    counts = [0] * num_streams
    streams = [asyncio.create_task(_stream(app, counts, i)) for i in range(num_streams)]
    await asyncio.sleep(seconds)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return sum(counts)


async def _stream(app: Starlette, counts: list[int], number: int) -> None:
    """One streamed completion, asked for as a web server would ask the application."""
    fields = {"prompt": [number + 1], "max_tokens": 2**19, "ignore_eos": True, "stream": True}
    body = {"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}
    unread = [body]

    async def receive() -> dict[str, Any]:
        return unread.pop() if unread else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        counts[number] += message["type"] == "http.response.body"

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    rest = {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("m", 80)}
    await app(scope | rest | {"client": ("c", 1), "root_path": ""}, receive, send)


def run_clock(step_time: str, report: str, descriptor: str) -> int:
    """The engine process; it leaves its times in a file."""
    core = Clock(float(step_time))
    status = serve_core(int(descriptor), lambda config: core)
    Path(report).write_text(json.dumps(core.late))
    return status


def main() -> None:
    """Measure both, in turns, for each length of a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 10.0, 20.0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    print("step ms  engine      device busy  late p50 ms  late p99 ms  messages/s")
    for step_ms in args.step_ms:
        for split in (False, True):
            result = measure(step_ms / 1e3, args.seconds, args.streams, split=split)
            print(
                f"{step_ms:7g}  {'apart' if split else 'same process':12}{result.busy:11.1%}"
                f"{result.late[0]:13.2f}{result.late[1]:13.2f}{result.messages:12,.0f}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--clock"]:
        sys.exit(run_clock(*sys.argv[2:]))
    main()
