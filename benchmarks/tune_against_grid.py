"""Does `paged tune` find what a grid of as many runs finds?

    python benchmarks/tune_against_grid.py [MODEL] [--requests 24] [--max-runs 20] [--rounds 3]

The same requests, all at once, shared prefixes among them. First a tune, then a grid over the
sequences and the tokens in a step and the prefix cache with as many points as the tune made runs.
What each found best then runs in turns, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from paged.runtime.bench.offline import without_weights
from paged.runtime.bench.workload_file import write_workload
from paged.runtime.bench.workloads import BenchRequest, IdRange, prefix_repetition_requests
from paged.runtime.config import EngineConfig
from paged.runtime.tune.command import tune
from paged.runtime.tune.journal import Journal, Task
from paged.runtime.tune.levers import Values
from paged.runtime.tune.options import TuneOptions
from paged.runtime.tune.report import as_flags
from paged.runtime.tune.search import Trial, changed
from paged.runtime.tune.workbench import Load, Workbench

# Around the defaults of a CPU (32 and 512), which are the baseline.
_SEQUENCES = (8, 16, 32, 64)
_TOKENS = (128, 256, 512, 1024)


def main() -> int:
    """Returns 0 if the tune's best is within 3 % of the grid's, or better."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = EngineConfig(model=args.model)
    with tempfile.TemporaryDirectory() as folder:
        found, baseline, num_runs = _tuned(config, args, Path(folder))
        bench = Workbench(config, _load(config, args), _journal(Path(folder) / "grid"))
        try:
            bench.start()
            tried = [bench.measure(Trial(values)) for values in _grid(baseline, num_runs)]
            best = max(tried, key=lambda trial: trial.throughput)
            ratio = _in_turns(config, args, [Trial(found), best], baseline, Path(folder))
        finally:
            bench.close()
    sys.stdout.write(f"{num_runs} runs each. The tune's best beside the grid's: {ratio:.3f}\n")
    return 0 if ratio >= 0.97 else 1


def _tuned(
    config: EngineConfig, args: argparse.Namespace, folder: Path
) -> tuple[Values, Values, int]:
    """The tune's best, the baseline, and the runs that it took."""
    workload = folder / "workload.jsonl"
    write_workload(workload, _requests(config, args))
    options = TuneOptions(
        workload=str(workload),
        output_dir=str(folder / "tune"),
        max_runs=args.max_runs,
        keep_precision=True,
    )
    findings = tune(config, options)
    assert findings.best is not None
    num_runs = sum(len(verdict.trial.runs) for verdict in findings.verdicts)
    return findings.best.values, findings.baseline, num_runs


def _grid(baseline: Values, num_points: int) -> Iterator[Values]:
    """As many points, spread over the whole grid."""
    points = [
        {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "enable_prefix_caching": caching}
        for caching, seqs, tokens in itertools.product((True, False), _SEQUENCES, _TOKENS)
    ]
    for number in range(min(num_points, len(points))):
        point = points[number * len(points) // min(num_points, len(points))]
        yield {**baseline, **point}


def _in_turns(
    config: EngineConfig,
    args: argparse.Namespace,
    trials: list[Trial],
    baseline: Values,
    folder: Path,
) -> float:
    """The median of the first one's throughput over the other's."""
    bench = Workbench(config, _load(config, args), _journal(folder / "turns"))
    trials = [Trial(trial.values) for trial in trials]
    try:
        bench.start()
        for _ in range(args.rounds):
            trials = [bench.measure(trial) for trial in trials]
    finally:
        bench.close()
    for trial, name in zip(trials, ("tune", "grid"), strict=True):
        flags = as_flags(changed(trial.values, baseline)) or "the defaults"
        sys.stdout.write(f"{name}: {flags}: {trial.throughput:.1f} output tokens/s\n")
    pairs = zip(*(trial.runs for trial in trials), strict=True)
    return statistics.median(
        one.output_tokens_per_second / other.output_tokens_per_second for one, other in pairs
    )


def _load(config: EngineConfig, args: argparse.Namespace) -> Load:
    requests = _requests(config, args)
    return Load(requests, [0.0] * len(requests), progress=True)


def _requests(config: EngineConfig, args: argparse.Namespace) -> list[BenchRequest]:
    ids = IdRange.below(without_weights(config).config.vocab_size)
    return prefix_repetition_requests(
        args.requests,
        seed=0,
        ids=ids,
        num_prefixes=4,
        prefix_len=128,
        suffix_len=32,
        output_len=24,
    )


def _journal(folder: Path) -> Journal:
    folder.mkdir()
    return Journal(folder, Task(None, {}, "", {}))


if __name__ == "__main__":
    sys.exit(main())
