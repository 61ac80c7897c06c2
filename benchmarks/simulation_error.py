"""How far `paged simulate` is off: a workload on a real engine, and simulated.

    python benchmarks/simulation_error.py [MODEL] [--rounds 3] [--loads 0.5,0.8,1.2]

Each round sends requests at random moments, at shares of the rate that the engine did when all came
at once. Half of the prompts are as in chats, the others begin with one of four long prefixes. The
same requests at the same times then go to one simulated replica. Its step times are fitted, with
`--fit bench`, to the engine's compiled steps, timed before and after (as `paged bench steps` does),
and to nothing of the run; with `--fit run` to the steps of the run itself, which is for a machine
that other programs slow down now more, now less: then only what steps add up to is compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.bench.engine_load import run_workload
from paged.runtime.bench.load import arrival_times
from paged.runtime.bench.options import ArrivalOptions, StepOptions
from paged.runtime.bench.results import RunResult
from paged.runtime.bench.step_times import measure_steps
from paged.runtime.bench.workloads import (
    BenchRequest,
    IdRange,
    lognormal_requests,
    prefix_repetition_requests,
)
from paged.runtime.config import EngineConfig
from paged.runtime.engine import find_model
from paged.runtime.runner import InFlight, StepResult
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.simulation.fleet import EngineShape, Fleet
from paged.runtime.simulation.inputs import measured_step
from paged.runtime.simulation.report import Summary, summarize
from paged.runtime.simulation.step_times import MeasuredStep, fit
from paged.runtime.simulation.traces import Tree, Turn
from paged.runtime.step_costs import Work
from paged.runtime.step_record import StepRecord

SIZES = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=1024)


@dataclass(frozen=True)
class Comparison:
    """One run: figures as the engine had them, and as they were simulated.

    Attributes:
        load: requests a second, as a share of what the engine did.
        real, simulated: by name.
    """

    round: int
    load: float
    real: dict[str, float]
    simulated: dict[str, float]

    def errors(self) -> dict[str, float]:
        """Of what is simulated, as a share of what is real."""
        return {name: self.simulated[name] / real - 1 for name, real in self.real.items()}

    def row(self) -> str:
        cells = [f"{self.round}", f"{self.load:g}"]
        for name, error in self.errors().items():
            cells.append(f"{self.simulated[name]:,.1f} / {self.real[name]:,.1f} ({error:+.0%})")
        return f"| {' | '.join(cells)} |"


def workload(num_requests: int, seed: int, vocab_size: int) -> list[BenchRequest]:
    """Half as in chats, half with long prefixes, in random order."""
    ids, half = IdRange.below(vocab_size), num_requests // 2
    chats = lognormal_requests(
        num_requests - half, seed=seed, ids=ids, input_mean=96, output_mean=40, max_len=300
    )
    shared = prefix_repetition_requests(
        half, seed=seed + 1, ids=ids, num_prefixes=4, prefix_len=256, suffix_len=32, output_len=32
    )
    order = np.random.default_rng(seed).permutation(num_requests)
    return [(*chats, *shared)[number] for number in order]


def simulated(shape: EngineShape, requests: Sequence[BenchRequest]) -> Summary:
    """The same requests on one replica of the mind."""
    trees = []
    for each in requests:
        assert not isinstance(each.prompt, str), "prompts are token ids"
        trees.append(Tree(each.arrival, each.prompt, Turn(0, each.num_output_tokens)))
    return summarize(Fleet(shape, 1).run(trees), 1, "prefix")


def shape_of(steps: Sequence[MeasuredStep], num_pages: int) -> EngineShape:
    """The engine as it is started here."""
    return EngineShape(SIZES, fit(steps), num_pages)


def timed_steps(config: EngineConfig, args: argparse.Namespace) -> list[MeasuredStep]:
    """The compiled steps, timed, unless those of runs are wanted."""
    if args.fit == "run":
        return []
    options = StepOptions(contexts=(0, 128, 512), seconds=args.step_seconds, disable_tqdm=True)
    return [measured_step(each) for each in measure_steps(config, options).steps]


@contextmanager
def recorded_steps() -> Iterator[list[MeasuredStep]]:
    """What engines of this process run meanwhile."""
    steps: list[MeasuredStep] = []
    read, done = StepRecord.read, 0.0

    def read_and_note(record: StepRecord, step: InFlight) -> StepResult:
        nonlocal done
        result, begun, done = read(record, step), max(done, step.launch_time), time.perf_counter()
        _, context, pairs = Work.of(step.plan)
        steps.append(MeasuredStep(step.bucket.num_tokens, context, pairs, 1e3 * (done - begun)))
        return result

    with patch.object(StepRecord, "read", read_and_note):
        yield steps


def figures_of(run: RunResult) -> dict[str, float]:
    """Of a real run."""
    times = run.times
    return {
        "requests/s": run.requests_per_second,
        "output tokens/s": run.output_tokens_per_second,
        "TTFT p50": times["ttft"].p50,
        "TTFT p99": times["ttft"].p99,
        "TPOT p99": times["tpot"].p99,
        "E2E p50": times["e2el"].p50,
        "E2E p99": times["e2el"].p99,
        "hits, %": 100 * (run.engine.prefix_hit_rate if run.engine else 0.0),
    }


def figures_in(summary: Summary) -> dict[str, float]:
    """The same of a simulated one."""
    times = summary.milliseconds
    return {
        "requests/s": summary.request_rate,
        "output tokens/s": summary.output_rate,
        "TTFT p50": times["ttft"]["p50"],
        "TTFT p99": times["ttft"]["p99"],
        "TPOT p99": times["tpot"]["p99"],
        "E2E p50": times["e2el"]["p50"],
        "E2E p99": times["e2el"]["p99"],
        "hits, %": 100 * summary.hit_rate,
    }


def comparisons(number: int, args: argparse.Namespace) -> Iterator[Comparison]:
    """One round."""
    config = EngineConfig(
        model=args.model,
        max_num_seqs=SIZES.max_num_seqs,
        max_num_batched_tokens=SIZES.max_num_batched_tokens,
        max_model_len=SIZES.max_model_len,
    )
    vocab_size = find_model(config).config.vocab_size
    steps = timed_steps(config, args)
    engine = AsyncEngine.from_config(config)
    runs = []
    try:
        num_pages = engine.stats().num_pages + 1
        everything = workload(args.requests, 1000 * number, vocab_size)
        rate = run_workload(engine, everything, empty_cache=True).requests_per_second
        for load in map(float, args.loads.split(",")):
            requests = workload(args.requests, 1000 * number + round(100 * load), vocab_size)
            options = ArrivalOptions(request_rate=rate * load)
            times = arrival_times(args.requests, options, number)
            both = zip(requests, times.tolist(), strict=True)
            requests = [replace(request, arrival=at) for request, at in both]
            with recorded_steps() as ran:
                runs.append((load, requests, run_workload(engine, requests, empty_cache=True), ran))
    finally:
        engine.shutdown()
    steps += timed_steps(config, args)
    for load, requests, run, ran in runs:
        summary = simulated(shape_of(steps or ran, num_pages), requests)
        yield Comparison(number, load, figures_of(run), figures_in(summary))


def main() -> None:
    """Compare, and print a row of a table for each run, and the median errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", help="default the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="0.5,0.8,1.2", help="shares of what it can do")
    parser.add_argument("--requests", type=int, default=100, help="of a run")
    parser.add_argument("--fit", choices=("bench", "run"), default="bench", help="to which steps")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="that each step is timed")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    found: list[Comparison] = []
    for number in range(args.rounds):
        for each in comparisons(number, args):
            if not found:
                titles = ("round", "load", *each.real)
                print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
            found.append(each)
            print(each.row(), flush=True)
    for name in found[0].real:
        errors = np.array([each.errors()[name] for each in found])
        print(f"{name}: median {np.median(errors):+.1%}, of sizes {np.median(np.abs(errors)):.1%}")
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found]) + "\n")


if __name__ == "__main__":
    main()
