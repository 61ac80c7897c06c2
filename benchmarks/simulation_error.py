"""How far `paged simulate` is off: a workload on a real engine, and simulated.

    python benchmarks/simulation_error.py [MODEL] [--rounds 3] [--loads 0.5,0.8,1.2]

Each round times the engine's compiled steps (as `paged bench steps` does), sends requests at random
moments at shares of the rate that the simulation says the engine can do, and times the steps again:
what else runs on the machine changes them. Half of the prompts are as in chats, the others begin
with one of four long prefixes. The same requests at the same times then go to one simulated replica
whose step times are fitted to the timed steps of that round alone; nothing is fitted to the run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.simulation.fleet import EngineShape, Fleet
from paged.runtime.simulation.inputs import measured_step
from paged.runtime.simulation.report import Summary, summarize
from paged.runtime.simulation.step_times import MeasuredStep, fit
from paged.runtime.simulation.traces import Tree, Turn

SIZES = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024)


@dataclass(frozen=True)
class Comparison:
    """One run: figures as the engine had them, and as they were simulated.

    Attributes:
        load: requests a second, as a share of what the simulation says can be done.
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


def measure(config: EngineConfig, args: argparse.Namespace) -> list[MeasuredStep]:
    """Time the compiled steps."""
    options = StepOptions(contexts=(0, 128, 512), seconds=args.step_seconds, disable_tqdm=True)
    return [measured_step(each) for each in measure_steps(config, options).steps]


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
    steps = measure(config, args)
    engine = AsyncEngine.from_config(config)
    runs = []
    try:
        num_pages = engine.stats().num_pages + 1
        all_at_once = workload(200, 1000 * number, vocab_size)
        rate = simulated(shape_of(steps, num_pages), all_at_once).request_rate
        for load in map(float, args.loads.split(",")):
            count = max(round(rate * load * args.seconds), 20)
            requests = workload(count, 1000 * number + round(100 * load), vocab_size)
            times = arrival_times(count, ArrivalOptions(request_rate=rate * load), number)
            both = zip(requests, times.tolist(), strict=True)
            requests = [replace(request, arrival=at) for request, at in both]
            runs.append((load, requests, run_workload(engine, requests, empty_cache=True)))
    finally:
        engine.shutdown()
    shape = shape_of([*steps, *measure(config, args)], num_pages)
    for load, requests, run in runs:
        yield Comparison(number, load, figures_of(run), figures_in(simulated(shape, requests)))


def main() -> None:
    """Compare, and print a row of a table for each run, and the median errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", help="default the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="0.5,0.8,1.2", help="shares of what it can do")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in a run")
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
