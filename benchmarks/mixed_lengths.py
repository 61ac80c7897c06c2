"""Short requests among very long ones: what each policy makes of both.

    python benchmarks/mixed_lengths.py MODEL --max-model-len 32768 [--json FILE]
    python benchmarks/mixed_lengths.py --simulate

`--short` requests (300 tokens in, 128 out) and `--long` ones (30,000 in, 64 out) come at random
moments of `--spreads` seconds: 0 for all at once, in random order. Told are the times to the first
and the last token of the short ones, alone and among the others under each policy, and how many
tokens of the long ones are done a second until the last of them. The engine starts once. Each case
gets a scheduler of its own, which keeps what those before it learnt of costs. With `--simulate` the
scheduler is the real one, and a step's time comes from the model of `step_simulation.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.step_simulation import ENGINE, step_clock
from paged.pool import PagePool
from paged.runtime.lanes import Lanes
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import Sequence as Running
from paged.runtime.sequence import SequenceLimits
from paged.runtime.simulation.replica import Replica

if TYPE_CHECKING:
    from paged.runtime.bench.workloads import BenchRequest

ALONE = "alone"


@dataclass(frozen=True)
class Arrival:
    """A request to come, at so many seconds."""

    seconds: float
    is_long: bool
    num_prompt: int
    num_output: int


@dataclass(frozen=True)
class Done:
    """What became of a request: seconds of its arrival, its first token and its last."""

    arrival: Arrival
    first: float
    last: float


class Device(Protocol):
    """What requests run on; seconds count from the start of a case."""

    def now(self) -> float: ...
    def sleep_until(self, seconds: float) -> None: ...
    def add(self, number: int, arrival: Arrival) -> None: ...
    def step(self) -> list[tuple[int, bool]]:
        """Numbers of the requests that got a token, and whether it was their last."""

    @property
    def has_work(self) -> bool: ...


class Simulated:
    """The real scheduler one step ahead of a device whose steps take the time of a model."""

    def __init__(self, config: SchedulerConfig, num_pages: int = ENGINE.num_pages) -> None:
        clock = step_clock(config, ENGINE.page_size)
        config = replace(config, step_sizes=clock.buckets.mixed)
        scheduler = Scheduler(config, PagePool(num_pages, ENGINE.page_size))
        self.replica = Replica(scheduler, clock.seconds)
        self._now = 0.0

    @property
    def has_work(self) -> bool:
        return self.replica.scheduler.has_work or not self.replica.is_idle

    def now(self) -> float:
        return self._now

    def sleep_until(self, seconds: float) -> None:
        self._now = max(self._now, seconds)

    def add(self, number: int, arrival: Arrival) -> None:
        prompt = [number, *[0] * (arrival.num_prompt - 1)]  # no two begin alike
        limits = SequenceLimits(max_tokens=arrival.num_output)
        self.replica.add(Running(number, prompt, limits, arrival=arrival.seconds))

    def step(self) -> list[tuple[int, bool]]:
        end = self.replica.launch(self._now)
        if end is None:
            return []
        self._now = end
        events = self.replica.read()
        return [(each.sequence.sequence_id, each.finish_reason is not None) for each in events]


class Engine:
    """An engine that runs; each case begins with an empty prefix cache and a new scheduler."""

    def __init__(self, args: argparse.Namespace) -> None:
        from benchmarks.offline_baselines import engine_config
        from paged.models.loading import resolve_model
        from paged.runtime.core import EngineCore

        source = resolve_model(args.model, load_format="dummy")
        config = replace(
            engine_config(args),
            scheduling_policy="lanes",
            attention_tuning_seconds=args.tuning_seconds,
        )
        self.core = EngineCore(config, source, progress=False)
        self.vocab_size = source.config.vocab_size
        self.requests: list[BenchRequest] = []
        self.start = 0.0

    def begin(self, config: SchedulerConfig, arrivals: Sequence[Arrival]) -> None:
        """A case under this configuration begins now."""
        from paged.runtime.bench.workloads import IdRange, random_requests

        ids = IdRange.below(self.vocab_size)
        self.requests = [
            random_requests(1, each.num_prompt, each.num_output, seed=number, ids=ids)[0]
            for number, each in enumerate(arrivals)
        ]
        costs, pool = self.core._scheduler.costs, self.core._pool
        pool.reset_prefix_cache()
        self.core._scheduler = Scheduler(config, pool)
        self.core._scheduler.costs = costs
        self.start = time.perf_counter()

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    def now(self) -> float:
        return time.perf_counter() - self.start

    def sleep_until(self, seconds: float) -> None:
        time.sleep(max(seconds - self.now(), 0))

    def add(self, number: int, arrival: Arrival) -> None:
        from benchmarks.offline_baselines import add

        add(self.core, str(number), self.requests[number])

    def step(self) -> list[tuple[int, bool]]:
        news = self.core.step()
        return [(int(each.request_id), each.finish_reason is not None) for each in news]


def arrivals(args: argparse.Namespace, spread: float) -> list[Arrival]:
    """All requests, in the order in which they come, in so many seconds."""
    chance = random.Random(args.seed)
    kinds = [False] * args.short + [True] * args.long
    chance.shuffle(kinds)
    moments = sorted(chance.uniform(0, spread) for _ in kinds)
    short, long = (args.short_prompt, args.short_output), (args.long_prompt, args.long_output)
    return [
        Arrival(at, is_long, *(long if is_long else short))
        for at, is_long in zip(moments, kinds, strict=True)
    ]


def run(device: Device, requests: Sequence[Arrival]) -> list[Done]:
    """Send every request when its time has come, and wait for all answers."""
    waiting, times = deque(enumerate(requests)), dict[int, list[float]]()
    done: list[Done] = []
    while waiting or device.has_work:
        if waiting and not device.has_work:
            device.sleep_until(waiting[0][1].seconds)
        while waiting and waiting[0][1].seconds <= device.now():
            device.add(*waiting.popleft())
        for number, is_last in device.step():
            times.setdefault(number, []).append(device.now())
            if is_last:
                done.append(Done(requests[number], times[number][0], times[number][-1]))
    return done


@dataclass(frozen=True)
class Result:
    """One case: seconds of the short requests, and tokens a second of the long ones.

    Attributes:
        case: the policy, or that there were no long ones.
        spread: seconds in which the requests came.
        first, last: from a short request's arrival to its first and its last token.
        long_rate: tokens of the long ones, prompts included, until the last of them.
        over_time: (arrival, seconds to the last token) of each short request.
    """

    case: str
    spread: float
    first: dict[int, float]
    last: dict[int, float]
    long_rate: float
    over_time: list[tuple[float, float]]

    @classmethod
    def of(cls, case: str, spread: float, done: Sequence[Done]) -> Result:
        short = [each for each in done if not each.arrival.is_long]
        long = [each for each in done if each.arrival.is_long]
        tokens = sum(each.arrival.num_prompt + each.arrival.num_output for each in long)
        seconds = max((each.last for each in long), default=0.0) - min(
            (each.arrival.seconds for each in long), default=0.0
        )
        took = [(each.arrival.seconds, each.last - each.arrival.seconds) for each in short]
        return cls(
            case=case,
            spread=spread,
            first=_percentiles([each.first - each.arrival.seconds for each in short]),
            last=_percentiles([seconds for _, seconds in took]),
            long_rate=round(tokens / seconds, 1) if long else 0.0,
            over_time=[(round(at, 4), round(seconds, 4)) for at, seconds in sorted(took)],
        )

    def row(self, alone: Result | None, fcfs: Result | None) -> str:
        """Of the table; with times as multiples of those alone."""
        cells = [f"{self.spread:g}", self.case]
        for name in ("first", "last"):
            mine = getattr(self, name)
            cells += [f"{mine[50]:.3f}", f"{mine[99]:.3f}"]
            cells.append(f"{mine[99] / getattr(alone, name)[99]:.2f}" if alone else "")
        cells.append(f"{self.long_rate:,.0f}" if self.long_rate else "")
        cells.append(f"{self.long_rate / fcfs.long_rate:.2f}" if fcfs and self.long_rate else "")
        return f"| {' | '.join(cells)} |"


TITLES = (
    *("spread, s", "case", "first token p50, s", "p99", "times alone", "last token p50, s", "p99"),
    *("times alone", "long tokens/s", "times fcfs"),
)


def _percentiles(seconds: list[float]) -> dict[int, float]:
    p50, p99 = np.percentile(seconds, (50, 99))
    return {50: round(float(p50), 4), 99: round(float(p99), 4)}


def scheduling(args: argparse.Namespace) -> SchedulerConfig:
    """Of the simulation; an engine knows its own."""
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs or 1024,
        max_num_batched_tokens=args.max_num_batched_tokens or 8192,
        max_model_len=args.max_model_len,
    )


def results(args: argparse.Namespace) -> Iterator[Result]:
    """Of each case."""
    engine = None if args.simulate else Engine(args)
    config = scheduling(args) if engine is None else engine.core._scheduler.config
    lanes = Lanes(args.threshold, args.share, args.most_long)
    for spread, case in product(map(float, args.spreads.split(",")), args.cases.split(",")):
        changed = replace(config, policy="fcfs" if case == ALONE else case, lanes=lanes)
        requests = [each for each in arrivals(args, spread) if case != ALONE or not each.is_long]
        if engine is not None:
            engine.begin(changed, requests)
        yield Result.of(case, spread, run(engine or Simulated(changed), requests))
    if engine is not None:
        engine.core.close()


def plot(found: Sequence[Result], path: Path) -> None:
    """Draw the seconds to the last token of each short request by its arrival."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "mixed lengths", "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for result, marker in zip(found, ".x+o", strict=False):
        axes.plot(*zip(*result.over_time, strict=True), marker, label=result.case, markersize=5)
    axes.set(yscale="log", xlabel="arrival, s", ylabel="last token after, s")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from benchmarks.offline_baselines import add_engine_arguments

    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_engine_arguments(made)
    made.add_argument("--simulate", action="store_true", help="no device, no model")
    for name, default in (("short", 100), ("long", 10)):
        made.add_argument(f"--{name}", type=int, default=default, help=f"{name} requests")
    sizes = {"short-prompt": 300, "short-output": 128, "long-prompt": 30_000, "long-output": 64}
    for name, size in sizes.items():
        made.add_argument(f"--{name}", type=int, default=size, help="tokens")
    made.add_argument("--spreads", default="0,2", help="seconds in which they come")
    made.add_argument("--cases", default=f"{ALONE},fcfs,lanes")
    made.add_argument("--threshold", type=int, default=Lanes.long_prompt, help="long from here on")
    made.add_argument("--share", type=float, default=Lanes.share, help="kept for short ones")
    made.add_argument("--most-long", type=int, default=Lanes.most_long, help="computed at once")
    made.add_argument("--tuning-seconds", type=float, default=40.0, help="of attention, once")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--plot", type=Path, help="also draw the last of --spreads here, as SVG")
    made.add_argument("--json", type=Path, help="also write the figures here")
    made.set_defaults(max_model_len=32_768)
    return made


def main() -> None:
    """Measure, and print a row of a table for each case."""
    arguments = sys.argv[1:]
    if "--simulate" in arguments:
        arguments = ["", *arguments]
    args = parser().parse_args(arguments)
    print(f"| {' | '.join(TITLES)} |\n|{' --- |' * len(TITLES)}")
    told: dict[tuple[float, str], Result] = {}
    for result in results(args):
        told[result.spread, result.case] = result
        alone, fcfs = (told.get((result.spread, case)) for case in (ALONE, "fcfs"))
        print(result.row(alone, fcfs), flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in told.values()]) + "\n")
    if args.plot:
        spread = result.spread
        plot([each for each in told.values() if each.spread == spread], args.plot)


if __name__ == "__main__":
    main()
