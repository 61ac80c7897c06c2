"""What scheduling and padding make of a card's step times, simulated without a device.

    python benchmarks/step_simulation.py [--streams 64,128,256] [--max-num-batched-tokens 8192]

The real scheduler, pool and buckets run one step ahead, as the engine does; only a step's time
comes from a table, that of Llama-3.1-8B on one H200 (see `StepCost`). Closed loops of the serving
comparison (300 tokens in, 128 out: each stream sends its next request when the last is answered)
tell requests/s and times to first token; workloads of chat-like lengths tell their output rates.
For all: the share of the device's time that goes into padding, which is what buckets waste, and how
many shapes were used. Host time is taken as hidden, and clients as instant.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from paged.pool import PagePool
from paged.runtime.bench.workloads import IdRange, baseline_requests
from paged.runtime.buckets import FEWEST_ROWS_ON_GPU, Buckets
from paged.runtime.plan import StepPlan
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import Sequence, SequenceLimits

PROMPT, OUTPUT = 300, 128
NUM_PAGES, PAGE_SIZE = 54_000, 16
HELP = "all at once, or with @N from N streams; '' for none"


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step.

    Attributes:
        tokens, dense: time of a step by its tokens, without reading keys and values; between these
            it is linear.
        cached: time per token of the contexts that decoding rows read.
    """

    tokens: tuple[float, ...] = (1, 8, 32, 128, 256, 512, 8192)
    dense: tuple[float, ...] = (4.27, 4.34, 4.65, 5.4, 7.5, 12.7, 188.0)
    cached: float = 131_072 / 4.4e9

    def of(self, num_tokens: float) -> float:
        """Of a step's products, by its tokens."""
        last, slope = self.tokens[-1], self.dense[-1] / self.tokens[-1]
        beyond = max(num_tokens - last, 0) * slope
        return float(np.interp(num_tokens, self.tokens, self.dense)) + beyond


@dataclass
class Clock:
    """The device's time, and what of it padding took. Milliseconds."""

    buckets: Buckets
    cost: StepCost
    now: float = 0.0
    padding: float = 0.0
    used: set[tuple[int, bool]] = field(default_factory=set)

    def run(self, plan: StepPlan) -> None:
        """A step passes."""
        bucket = self.buckets.pick(plan, scores_prompt=False)
        self.used.add((bucket.num_tokens, bucket.decode_only))
        padded = self.cost.of(bucket.num_tokens)
        context = sum(row.start + 1 for row in plan.rows if row.length == 1)
        self.now += padded + self.cost.cached * context
        self.padding += padded - self.cost.of(plan.num_tokens)


@dataclass(frozen=True)
class Report:
    """Of one workload: seconds, times to first token and gaps between tokens, in milliseconds."""

    name: str
    seconds: float
    num_requests: int
    num_outputs: int
    padding: float
    programs: int
    first: np.ndarray
    gaps: np.ndarray

    def line(self) -> str:
        """For people."""
        first, gaps = (np.percentile(each, (50, 90, 99)) for each in (self.first, self.gaps))
        return (
            f"{self.name:14}{self.num_requests / self.seconds:8.1f}"
            f"{self.num_outputs / self.seconds:10,.0f}"
            f"   {first[0]:7.0f}{first[1]:7.0f}{first[2]:7.0f}"
            f"   {gaps[0]:6.1f}{gaps[1]:7.1f}{gaps[2]:7.1f}{self.padding:9.1%}{self.programs:6}"
        )


HEAD = (
    f"{'':14}{'req/s':>8}{'out tok/s':>10}   {'TTFT p50, 90, 99 ms':>21}"
    f"   {'ITL p50, 90, 99':>20}{'padding':>9}{'shapes':>7}"
)


@dataclass
class Load:
    """Requests and when their tokens came.

    Attributes:
        waiting: requests yet to be sent, (prompt tokens, output tokens).
        times: by sequence, when it was sent and when each of its tokens came.
    """

    scheduler: Scheduler
    waiting: deque[tuple[int, int]]
    times: dict[Sequence, list[float]] = field(default_factory=dict)

    def send(self, count: int, now: float) -> None:
        """Send the next requests."""
        for _ in range(min(count, len(self.waiting))):
            num_prompt, num_output = self.waiting.popleft()
            number = len(self.times)
            # No two prompts begin alike.
            prompt = [number, *[0] * (num_prompt - 1)]
            limits = SequenceLimits(max_tokens=num_output)
            sequence = Sequence(number, prompt, limits, arrival=now)
            self.scheduler.add(sequence)
            self.times[sequence] = [now]

    def read(self, plan: StepPlan, now: float) -> int:
        """Take a step's tokens in; how many sequences it ended."""
        events = self.scheduler.update(plan, [0] * len(plan.rows))
        for event in events:
            self.times[event.sequence].append(now)
        return sum(event.finish_reason is not None for event in events)


def simulate(
    name: str, requests: list[tuple[int, int]], streams: int, args: argparse.Namespace
) -> Report:
    """Keep so many requests running until all are answered."""
    seqs, tokens = args.max_num_seqs, args.max_num_batched_tokens
    config = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=args.max_model_len
    )
    load = Load(Scheduler(config, PagePool(NUM_PAGES, PAGE_SIZE)), deque(requests))
    clock = Clock(Buckets.make(seqs, tokens, fewest_rows=FEWEST_ROWS_ON_GPU), StepCost())
    load.send(streams, 0.0)
    in_flight: deque[StepPlan] = deque()
    while load.scheduler.has_work or in_flight:
        plan = load.scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) > 1):
            oldest = in_flight.popleft()
            clock.run(oldest)
            load.send(load.read(oldest, clock.now), clock.now)
    return _report(name, load, clock)


def _report(name: str, load: Load, clock: Clock) -> Report:
    times = [np.array(each) for each in load.times.values()]
    return Report(
        name=name,
        seconds=clock.now / 1e3,
        num_requests=len(times),
        num_outputs=sum(len(each) - 1 for each in times),
        padding=clock.padding / clock.now,
        programs=len(clock.used),
        first=np.array([each[1] - each[0] for each in times]),
        gaps=np.concatenate([np.diff(each[1:]) for each in times]),
    )


def reports(args: argparse.Namespace) -> Iterator[Report]:
    """Every workload that was asked for."""
    for streams in map(int, filter(None, args.streams.split(","))):
        requests = [(PROMPT, OUTPUT)] * (args.rounds * streams)
        yield simulate(f"{streams} streams", requests, streams, args)
    for workload in filter(None, args.workloads.split(",")):
        name, _, streams = workload.partition("@")
        given = baseline_requests(name, None, seed=None, ids=IdRange())
        requests = [(each.num_input_tokens, each.num_output_tokens) for each in given]
        yield simulate(workload, requests, int(streams or len(requests)), args)


def main() -> None:
    """Simulate, and print a line for each workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--streams", default="1,8,32,64,128,256", help="'' for none")
    parser.add_argument("--workloads", default="B1,B4,B4@16,B4@64,B4@256", help=HELP)
    parser.add_argument("--rounds", type=int, default=8, help="requests of each stream")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=8192)
    args = parser.parse_args()
    buckets = Buckets.make(
        args.max_num_seqs, args.max_num_batched_tokens, fewest_rows=FEWEST_ROWS_ON_GPU
    )
    print(f"{len(buckets.decode)} decode shapes: {', '.join(map(str, buckets.decode))}")
    print(f"{len(buckets.mixed)} mixed shapes: {', '.join(map(str, buckets.mixed))}")
    print(HEAD)
    for report in reports(args):
        print(report.line(), flush=True)


if __name__ == "__main__":
    main()
