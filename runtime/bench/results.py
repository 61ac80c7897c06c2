"""What every benchmark finds, as one tree of records, and the file that keeps it.

A file is a JSON object: under `paged_bench` stands a `BenchResult`, and beside it may stand the
flat keys that scripts for other engines' benchmarks read. `--compare`, the HTML report and whoever
else wants figures read the tree:

    result = read_result(Path("result.json"))
    for run in result.runs:
        print(run.name, run.output_tokens_per_second, run.times["ttft"].p99)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paged.runtime.errors import ConfigError

VERSION = 1
"""Of the tree: grows when an older reader would misunderstand a newer file."""

KEY = "paged_bench"
METRICS = ("ttft", "tpot", "itl", "e2el", "queue")
"""Time to the first token, per token after it, between two pieces of the stream, to the last token,
and until the first token of the prompt entered a step."""

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Times:
    """How a time is spread over requests, or over the gaps of their streams; milliseconds.

    Attributes:
        count: values there were.
        curve: the percentiles 0, 1, ... 100.
    """

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    curve: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times | None:
        """None if there is nothing to spread."""
        if not len(seconds):
            return None
        values = np.asarray(seconds) * 1000
        curve = np.percentile(values, np.arange(101)).round(4).tolist()
        mean, std = round(float(values.mean()), 4), round(float(values.std()), 4)
        p50, p90, p95, p99 = (curve[each] for each in (50, 90, 95, 99))
        return cls(len(seconds), mean, std, p50, p90, p95, p99, tuple(curve))


@dataclass(frozen=True)
class EngineReport:
    """What the engine did between two moments.

    Attributes:
        num_steps: steps run.
        prefix_hit_rate: share of prompt tokens found in the prefix cache, 0 to 1.
        num_preemptions: times that a sequence was put back for lack of pages.
        kv_waste: mean share of token places in used pages that held no token, 0 to 1, as seen
            ten times a second; None if the run was too short to look.
        compiles_after_warmup: 0 unless something is wrong.
    """

    num_steps: int
    prefix_hit_rate: float
    num_preemptions: int
    kv_waste: float | None
    compiles_after_warmup: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """One line for people."""
        waste = "not seen" if self.kv_waste is None else f"{self.kv_waste:.1%}"
        yield (
            f"Engine: {self.num_steps} steps, prefix cache hits {self.prefix_hit_rate:.1%}, "
            f"{self.num_preemptions} preemptions, KV waste {waste}, "
            f"{self.compiles_after_warmup} compiles after warm-up"
        )


@dataclass(frozen=True)
class RequestTimes:
    """One request of a run; seconds.

    Attributes:
        start: when it was sent, from the start of the run.
        ttft, tpot, e2el: 0 where it failed; tpot is 0 for a single token too.
        queue: until its prompt was begun; None where only a server knows.
        kind: the group that it belongs to; "" for none.
        error: why it failed.
    """

    start: float
    num_input_tokens: int
    num_output_tokens: int
    ttft: float
    tpot: float
    e2el: float
    queue: float | None = None
    kind: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Timeline:
    """A run cut into equal pieces.

    Attributes:
        seconds: that a piece lasts.
        output_tokens_per_second, in_flight: in each of them; of requests, the mean.
    """

    seconds: float
    output_tokens_per_second: tuple[float, ...]
    in_flight: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One load on one engine or server.

    Attributes:
        name: what tells it from the other runs of a result, such as "prefix caching off".
        duration: seconds from the first request sent to the last one ended.
        num_completed, num_failed: requests.
        num_input_tokens, num_output_tokens: of those that completed.
        goodput: requests per second that met all goals; None without goals.
        goals: milliseconds by metric.
        times: by metric (see METRICS); one that nobody could see is absent.
        kinds: the same for each kind of request, where the workload has kinds.
        settings: what was different or worth telling: rate, concurrency, policy.
        engine: None where the engine is behind a server.
    """

    name: str
    duration: float
    num_completed: int
    num_failed: int
    num_input_tokens: int
    num_output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput: float | None = None
    goals: dict[str, float] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    kinds: dict[str, dict[str, Times]] = field(default_factory=dict)
    settings: dict[str, Value] = field(default_factory=dict)
    engine: EngineReport | None = None
    timeline: Timeline | None = None
    requests: tuple[RequestTimes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One compiled step, and how long it takes.

    Attributes:
        bucket: its name, such as "decode_8" or "mixed_256".
        num_tokens: places for tokens, all of them filled.
        rows: sequences in it.
        context_tokens: tokens before each row's own that its attention reads.
        ms: the median of its runs, tokens chosen and read by the host.
        flops, bytes: that it must do and move by the model's shapes: weights, pages, cache writes.
        xla_flops, xla_bytes: what XLA counts in the compiled program, all operands of every
            operation; None where it does not say. Kernels of our own are not in it.
        bandwidth_fraction, flops_fraction: of the device's ceilings, by `flops` and `bytes`.
    """

    bucket: str
    num_tokens: int
    rows: int
    context_tokens: int
    ms: float
    flops: float
    bytes: float
    xla_flops: float | None = None
    xla_bytes: float | None = None
    bandwidth_fraction: float = 0.0
    flops_fraction: float = 0.0


@dataclass(frozen=True)
class Ceilings:
    """What a device was measured to do, per second."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What one command found.

    Attributes:
        command: "serve", "prefix", ...
        date: ISO 8601, with its zone.
        model: its name, as it was given.
        device: what ran it; "" where that is behind a server.
        version: of this tree.
        runs: loads; of `steps` there are none.
        steps, ceilings: of `steps` alone.
    """

    command: str
    date: str
    model: str
    device: str = ""
    label: str = ""
    version: int = VERSION
    runs: tuple[RunResult, ...] = ()
    steps: tuple[StepTime, ...] = ()
    ceilings: Ceilings | None = None


def now() -> str:
    """The date of a result that is made now."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def as_json(result: BenchResult) -> dict[str, Any]:
    """What a file holds of a result: add what else is to stand in it."""
    return {KEY: msgspec.to_builtins(result)}


def write_result(result: BenchResult, path: Path) -> None:
    """Write a file of the result alone."""
    path.write_text(json.dumps(as_json(result)) + "\n", encoding="utf-8")


def read_result(path: Path) -> BenchResult:
    """The result in a file.

    Raises:
        ConfigError: it cannot be read, is no result, or a newer one than is known here.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no result of `paged bench`: {error}") from error
    tree = found.get(KEY) if isinstance(found, dict) else None
    if not isinstance(tree, dict):
        raise ConfigError(f'{path} is no result of `paged bench`: it has no "{KEY}"')
    if tree.get("version") != VERSION:
        raise ConfigError(
            f"{path} is a result of version {tree.get('version')}, this Paged reads {VERSION}: "
            "measure again"
        )
    try:
        return msgspec.convert(tree, BenchResult)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is a broken result of `paged bench`: {error}") from error
