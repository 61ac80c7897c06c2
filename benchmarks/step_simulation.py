"""What scheduling and padding make of a card's step times, simulated without a device.

    python benchmarks/step_simulation.py [--streams 64,128,256] [--max-num-batched-tokens 8192]

The real scheduler, pool and buckets run one step ahead, as the engine does; only a step's time
comes from a model, fitted to Llama-3.1-8B on one H200 (see `ENGINE`). Closed loops of the serving
comparison (300 tokens in, 128 out: each stream sends its next request when the last is answered)
tell requests/s and times to first token; workloads of chat-like lengths tell their output rates.
For all: the share of the device's time that goes into padding, which is what buckets waste, how
many shapes were used, and what planning and reading a step takes of this host's processor. In the
simulated time that is taken as hidden, and clients as instant.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from paged.pool import PagePool
from paged.runtime.bench.workloads import BenchRequest, IdRange, baseline_requests
from paged.runtime.buckets import Buckets
from paged.runtime.plan import TokenEvent
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import Sequence, SequenceLimits
from paged.runtime.simulation.measured import MEASURED
from paged.runtime.simulation.replica import Replica
from paged.runtime.simulation.step_times import StepClock
from paged.runtime.simulation.traces import tokens_of

Request = tuple[list[int], int]
ENGINE = MEASURED["h200-llama-3.1-8b-bf16"]
PROMPT, OUTPUT = 300, 128
HELP = "all at once, or with @N from N streams; '' for none"


@dataclass(frozen=True)
class Report:
    """Of one workload: seconds, times to first token and gaps between tokens, in seconds.

    Attributes:
        host: seconds of the processor that a step took.
    """

    name: str
    seconds: float
    num_requests: int
    num_outputs: int
    padding: float
    programs: int
    host: float
    first: np.ndarray
    gaps: np.ndarray

    def line(self) -> str:
        """For people."""
        first, gaps = (1e3 * np.percentile(each, (50, 90, 99)) for each in (self.first, self.gaps))
        return (
            f"{self.name:14}{self.num_requests / self.seconds:8.1f}"
            f"{self.num_outputs / self.seconds:10,.0f}"
            f"   {first[0]:7.0f}{first[1]:7.0f}{first[2]:7.0f}"
            f"   {gaps[0]:6.1f}{gaps[1]:7.1f}{gaps[2]:7.1f}{self.padding:9.1%}{self.programs:6}"
            f"{1e6 * self.host:9.0f}"
        )


HEAD = (
    f"{'':14}{'req/s':>8}{'out tok/s':>10}   {'TTFT p50, 90, 99 ms':>21}"
    f"   {'ITL p50, 90, 99':>20}{'padding':>9}{'shapes':>7}{'host µs':>8}"
)


@dataclass
class Load:
    """Requests and when their tokens came.

    Attributes:
        waiting: requests yet to be sent: prompts, and how many tokens they generate.
        times: by sequence, when it was sent and when each of its tokens came.
    """

    replica: Replica
    waiting: deque[Request]
    times: dict[Sequence, list[float]] = field(default_factory=dict)

    def send(self, count: int, now: float) -> None:
        """Send the next requests."""
        for _ in range(min(count, len(self.waiting))):
            prompt, num_output = self.waiting.popleft()
            limits = SequenceLimits(max_tokens=num_output)
            sequence = Sequence(len(self.times), prompt, limits, arrival=now)
            self.replica.add(sequence)
            self.times[sequence] = [now]

    def take(self, events: list[TokenEvent], now: float) -> int:
        """Take note of a step's tokens; how many sequences it ended."""
        for event in events:
            self.times[event.sequence].append(now)
        return sum(event.finish_reason is not None for event in events)


def simulate(name: str, requests: list[Request], streams: int, args: argparse.Namespace) -> Report:
    """Keep so many requests running until all are answered."""
    config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
    )
    clock = step_clock(config, args.page_size)
    scheduler = Scheduler(config, PagePool(args.num_pages, args.page_size))
    load = Load(Replica(scheduler, clock.seconds), deque(requests))
    load.send(streams, 0.0)
    now = host = 0.0
    begun = time.process_time()
    while (end := load.replica.launch(now)) is not None:
        now, events = end, load.replica.read()
        host += time.process_time() - begun
        load.send(load.take(events, now), now)
        begun = time.process_time()
    return _report(name, load, clock, now, host)


def step_clock(config: SchedulerConfig, page_size: int) -> StepClock:
    """Of an engine that is configured so."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    buckets = Buckets.make(seqs, tokens, fewest_rows=ENGINE.fewest_rows)
    return StepClock(buckets, ENGINE.step_times(), page_size)


def _report(name: str, load: Load, clock: StepClock, seconds: float, host: float) -> Report:
    times = [np.array(each) for each in load.times.values()]
    return Report(
        name=name,
        seconds=seconds,
        num_requests=len(times),
        num_outputs=sum(len(each) - 1 for each in times),
        padding=clock.padding / 1e3 / seconds,
        programs=len(clock.used),
        host=host / load.replica.num_steps,
        first=np.array([each[1] - each[0] for each in times]),
        gaps=np.concatenate([np.diff(each[1:]) for each in times]),
    )


def reports(args: argparse.Namespace) -> Iterator[Report]:
    """Every workload that was asked for."""
    for streams in map(int, filter(None, args.streams.split(","))):
        numbers = range(args.rounds * streams)
        requests: list[Request] = [(tokens_of(number, PROMPT), OUTPUT) for number in numbers]
        yield simulate(f"{streams} streams", requests, streams, args)
    for workload in filter(None, args.workloads.split(",")):
        name, _, streams = workload.partition("@")
        given = baseline_requests(name, None, seed=None, ids=IdRange())
        requests = [(tokens(each), each.num_output_tokens) for each in given]
        yield simulate(workload, requests, int(streams or len(requests)), args)


def tokens(request: BenchRequest) -> list[int]:
    """Its prompt, which no baseline has as a text."""
    assert not isinstance(request.prompt, str), "a baseline's prompts are token ids"
    return request.prompt


def main() -> None:
    """Simulate, and print a line for each workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--streams", default="1,8,32,64,128,256", help="'' for none")
    parser.add_argument("--workloads", default="B1,B4,B4@16,B4@64,B4@256", help=HELP)
    parser.add_argument("--rounds", type=int, default=8, help="requests of each stream")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--page-size", type=int, default=ENGINE.page_size)
    parser.add_argument("--num-pages", type=int, default=ENGINE.num_pages, help="of the pool")
    args = parser.parse_args()
    buckets = Buckets.make(
        args.max_num_seqs, args.max_num_batched_tokens, fewest_rows=ENGINE.fewest_rows
    )
    print(f"{len(buckets.decode)} decode shapes: {', '.join(map(str, buckets.decode))}")
    print(f"{len(buckets.mixed)} mixed shapes: {', '.join(map(str, buckets.mixed))}")
    print(HEAD)
    for report in reports(args):
        print(report.line(), flush=True)


if __name__ == "__main__":
    main()
