"""`paged bench prefix`: a workload that shares prefixes, without and with a prefix cache."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from paged.runtime.bench.engine_load import run_workload, running_engine
from paged.runtime.bench.load import moments
from paged.runtime.bench.offline import config_of, result_here, without_weights
from paged.runtime.bench.options import PrefixOptions, WorkloadOptions
from paged.runtime.bench.publish import publish
from paged.runtime.bench.results import BenchResult, RunResult
from paged.runtime.bench.selection import select_requests
from paged.runtime.bench.tables import run_lines
from paged.runtime.config import EngineConfig
from paged.runtime.flags import read_flags


def run_prefix(args: argparse.Namespace) -> int:
    """Returns 0 if every request was answered, else 1.

    Raises:
        ConfigError, InvalidRequest: the runs cannot be made as asked.
    """
    options = read_flags(PrefixOptions, args)
    workload = read_flags(WorkloadOptions, args)
    result = measure(config_of(args), workload, options, seed=args.seed)
    publish(prefix_lines(result.runs), result, options)
    return int(any(run.num_failed for run in result.runs))


def measure(
    config: EngineConfig, workload: WorkloadOptions, options: PrefixOptions, *, seed: int | None
) -> BenchResult:
    """The same requests at the same moments on two engines.

    Args:
        seed: of prompts and moments; None for 0, or for a baseline workload's own.
    """
    source = without_weights(config)
    encode = None if config.skip_tokenizer_init else source.tokenizer().encode
    requests = select_requests(
        workload, seed=seed, vocab_size=source.config.vocab_size, encode=encode
    )
    times = moments(requests, options, seed).tolist()
    runs = []
    for name, is_on in (("prefix caching off", False), ("prefix caching on", True)):
        with running_engine(replace(config, enable_prefix_caching=is_on)) as engine:
            run = run_workload(
                engine,
                requests,
                name=name,
                times=times,
                max_concurrency=options.max_concurrency,
                goals=dict(options.goodput),
                ignore_eos=workload.generated,
                settings={"enable_prefix_caching": is_on, "dataset": workload.dataset_name},
                num_warmups=options.num_warmups,
                progress=not options.disable_tqdm,
            )
        runs.append(run)
    return result_here("prefix", source.name, options, runs)


def prefix_lines(runs: tuple[RunResult, ...]) -> Iterator[str]:
    """Tables, and in a line what the cache has changed."""
    yield from run_lines(runs)
    off, on = runs
    hits = on.engine.prefix_hit_rate if on.engine else 0.0
    changes = [f"{hits:.1%} of prompt tokens were cached"]
    if "ttft" in off.times and "ttft" in on.times:
        before, after = off.times["ttft"], on.times["ttft"]
        changes += [
            f"TTFT P50 went from {before.p50:.1f} to {after.p50:.1f} ms",
            f"P99 from {before.p99:.1f} to {after.p99:.1f} ms",
        ]
    if off.output_tokens_per_second:
        gain = on.output_tokens_per_second / off.output_tokens_per_second
        changes.append(f"output tokens/s are {gain:.2f} times as many")
    yield ""
    yield f"With prefix caching {', '.join(changes)}."
