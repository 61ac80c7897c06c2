"""`paged bench mixed`: what short requests see of long ones, under each scheduling policy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.bench.engine_load import run_workload, running_engine
from paged.runtime.bench.offline import config_of, result_here, without_weights
from paged.runtime.bench.options import MixedOptions
from paged.runtime.bench.publish import publish
from paged.runtime.bench.results import BenchResult, RunResult
from paged.runtime.bench.tables import Table, milliseconds, run_lines
from paged.runtime.bench.workloads import BenchRequest, IdRange, random_requests
from paged.runtime.config import EngineConfig
from paged.runtime.flags import read_flags

ALONE = "short alone"
SHORT, LONG = "short", "long"


def run_mixed(args: argparse.Namespace) -> int:
    """Returns 0 if every request was answered, else 1.

    Raises:
        ConfigError, InvalidRequest: the runs cannot be made as asked.
    """
    options = read_flags(MixedOptions, args)
    result = measure(config_of(args), options)
    publish(mixed_lines(result.runs), result, options)
    return int(any(run.num_failed for run in result.runs))


def measure(config: EngineConfig, options: MixedOptions) -> BenchResult:
    """The short requests alone, then all of them under each policy, at the same moments."""
    source = without_weights(config)
    requests = mixed_requests(
        options, seed=config.seed, ids=IdRange.below(source.config.vocab_size)
    )
    short = [request for request in requests if request.kind == SHORT]
    # A lane for long requests is no use if these are not long to it.
    threshold = min(config.long_prompt_threshold, options.long_input_len - 1) or 1
    runs: list[RunResult] = []
    for policy in options.policies:
        changed = replace(config, scheduling_policy=policy, long_prompt_threshold=threshold)
        with running_engine(changed) as engine:
            if not runs:
                runs.append(_run(engine, short, ALONE, options))
            runs.append(_run(engine, requests, policy, options))
    return result_here("mixed", source.name, options, runs)


def mixed_requests(options: MixedOptions, *, seed: int, ids: IdRange) -> list[BenchRequest]:
    """All requests in the order in which they come; short ones have the better priority."""
    rng = np.random.default_rng(seed)
    sizes = (
        (SHORT, options.num_short, options.short_input_len, options.short_output_len),
        (LONG, options.num_long, options.long_input_len, options.long_output_len),
    )
    requests = []
    for priority, (kind, number, inputs, outputs) in enumerate(sizes):
        moments = rng.uniform(0, options.arrival_seconds, number).tolist()
        drawn = random_requests(number, inputs, outputs, seed=seed + priority, ids=ids)
        requests += [
            replace(request, arrival=at, kind=kind, priority=priority)
            for request, at in zip(drawn, moments, strict=True)
        ]
    order = rng.permutation(len(requests))  # of those that come at the same moment
    return sorted((requests[place] for place in order), key=lambda request: request.arrival)


def mixed_lines(runs: Sequence[RunResult]) -> Iterator[str]:
    """Tables, the last of them about the short requests' tail."""
    yield from run_lines(runs)
    yield ""
    yield from tail_table(runs).lines()


def tail_table(runs: Sequence[RunResult]) -> Table:
    """P99 of the short requests alone and mixed, and what the long ones got meanwhile."""
    alone = runs[0]
    rows = []
    for run in runs:
        cells = [cell for metric in ("ttft", "e2el") for cell in _tail_cells(run, alone, metric)]
        rows.append((run.name, *cells, f"{_long_rate(run):,.0f}" if run is not alone else ""))
    head = ("run", "TTFT P99, ms", "times alone", "E2EL P99, ms", "times alone", "long tokens/s")
    return Table("Short requests", head, tuple(rows))


def _tail_cells(run: RunResult, alone: RunResult, metric: str) -> tuple[str, str]:
    """The P99, and how many times that of the short ones alone; dashes where none was answered."""
    mine, best = (each.kinds.get(SHORT, {}).get(metric) for each in (run, alone))
    return (
        "-" if mine is None else milliseconds(mine.p99),
        "-" if mine is None or best is None else f"{mine.p99 / best.p99:.2f}",
    )


def _run(
    engine: AsyncEngine, requests: Sequence[BenchRequest], name: str, options: MixedOptions
) -> RunResult:
    return run_workload(
        engine,
        requests,
        name=name,
        goals=dict(options.goodput),
        settings={
            "scheduling_policy": engine.config.scheduling_policy,
            "long_prompt_threshold": engine.config.long_prompt_threshold,
        },
        empty_cache=True,
        num_warmups=options.num_warmups,
        progress=not options.disable_tqdm,
    )


def _long_rate(run: RunResult) -> float:
    """Tokens of long requests, prompts included, a second from the first's start to the last's end.

    0 if none was answered.
    """
    done = [each for each in run.requests if each.kind == LONG and each.error is None]
    if not done:
        return 0.0
    tokens = sum(each.num_input_tokens + each.num_output_tokens for each in done)
    seconds = max(each.start + each.e2el for each in done) - min(each.start for each in done)
    return tokens / seconds
