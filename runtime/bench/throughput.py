"""`paged bench throughput`: everything is submitted at once; how many tokens a second come out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paged.runtime.bench.metrics import RequestRecord, ServeSummary
from paged.runtime.bench.offline import (
    EngineMeter,
    config_of,
    result_here,
    sampling,
    started_async_engine,
    started_llm,
    without_weights,
)
from paged.runtime.bench.options import ThroughputOptions, WorkloadOptions
from paged.runtime.bench.publish import publish
from paged.runtime.bench.results import EngineReport, RunResult
from paged.runtime.bench.run_results import run_result
from paged.runtime.bench.selection import select_requests
from paged.runtime.config import EngineConfig
from paged.runtime.flags import read_flags
from paged.runtime.outputs import RequestOutput


@dataclass(frozen=True)
class ThroughputReport:
    """An offline run.

    Attributes:
        start_seconds: to load and compile; not part of the rest.
        elapsed: seconds from the first prompt given to the last answer complete.
        num_input_tokens: of the prompts, each counted once.
        num_output_tokens: of all sequences.
        run: the same with the times of each request.
    """

    start_seconds: float
    elapsed: float
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    engine: EngineReport
    run: RunResult

    @property
    def num_tokens(self) -> int:
        return self.num_input_tokens + self.num_output_tokens

    def lines(self) -> Iterator[str]:
        yield f"Start-up: {self.start_seconds:.2f} s"
        yield (
            f"Throughput: {self.num_requests / self.elapsed:.2f} requests/s, "
            f"{self.num_tokens / self.elapsed:.2f} total tokens/s, "
            f"{self.num_output_tokens / self.elapsed:.2f} output tokens/s"
        )
        yield f"Total num prompt tokens:  {self.num_input_tokens}"
        yield f"Total num output tokens:  {self.num_output_tokens}"
        yield from self.engine.lines()

    def as_json(self) -> dict[str, Any]:
        return {
            "elapsed_time": self.elapsed,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_tokens,
            "requests_per_second": self.num_requests / self.elapsed,
            "tokens_per_second": self.num_tokens / self.elapsed,
            "total_input_tokens": self.num_input_tokens,
            "total_output_tokens": self.num_output_tokens,
            "output_tokens_per_second": self.num_output_tokens / self.elapsed,
            "start_seconds": self.start_seconds,
            "engine": self.engine.as_json(),
        }


def run_throughput(args: argparse.Namespace) -> int:
    """Returns 0.

    Raises:
        ConfigError, InvalidRequest: the run cannot be made as asked.
    """
    options = read_flags(ThroughputOptions, args)
    config = config_of(args)
    report = measure(config, read_flags(WorkloadOptions, args), options, seed=args.seed)
    result = result_here("throughput", without_weights(config).name, options, [report.run])
    publish(report.lines(), result, options, report.as_json())
    return 0


def measure(
    config: EngineConfig,
    workload: WorkloadOptions,
    options: ThroughputOptions,
    *,
    seed: int | None,
) -> ThroughputReport:
    """Start an engine and give it the workload.

    Args:
        seed: of the prompts; None for 0, or for a baseline workload's own.
    """
    source = without_weights(config)
    has_tokenizer = not config.skip_tokenizer_init
    requests = select_requests(
        workload,
        seed=seed,
        vocab_size=source.config.vocab_size,
        encode=source.tokenizer().encode if has_tokenizer and not workload.generated else None,
    )
    params = [
        sampling(
            request.num_output_tokens,
            n=options.n,
            ignore_eos=workload.generated,
            detokenize=has_tokenizer and not options.disable_detokenize,
        )
        for request in requests
    ]
    prompts = [request.prompt for request in requests]
    start = started_async_engine if options.async_engine else started_llm
    with start(config) as engine, EngineMeter(engine.stats) as meter:
        begin = time.perf_counter()
        outputs = engine.generate(prompts, params, not options.disable_tqdm)
        elapsed = time.perf_counter() - begin
    return _report(engine.start_seconds, elapsed, outputs, meter.report)


def _report(
    start_seconds: float,
    elapsed: float,
    outputs: Sequence[RequestOutput],
    engine: EngineReport,
) -> ThroughputReport:
    summary = ServeSummary([_record(output) for output in outputs], elapsed)
    run = run_result(summary, "throughput", engine=engine)
    # Of an engine that gives whole answers nobody sees the gaps between tokens.
    seen = {metric: times for metric, times in run.times.items() if metric != "itl"}
    return ThroughputReport(
        start_seconds=start_seconds,
        elapsed=elapsed,
        num_requests=len(outputs),
        num_input_tokens=summary.num_input_tokens,
        num_output_tokens=summary.num_output_tokens,
        engine=engine,
        run=replace(run, times=seen),
    )


def _record(output: RequestOutput) -> RequestRecord:
    """A request by the engine's own times, its tokens as if they had come evenly."""
    lengths = [len(sequence.token_ids) for sequence in output.outputs]
    times = output.metrics
    begun = times.first_scheduled_time or times.arrival_time
    first = times.first_token_time or begun
    chunks = np.linspace(first, times.finished_time or first, max(lengths))
    return RequestRecord(
        start=times.arrival_time,
        num_input_tokens=len(output.prompt_token_ids),
        num_output_tokens=sum(lengths),
        chunk_times=chunks.tolist(),
        counted=True,
        queue=begun - times.arrival_time,
    )
