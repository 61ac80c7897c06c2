"""`paged bench latency`: how long one batch takes, over and over."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import trange

from paged.runtime.bench.offline import (
    EngineMeter,
    StartedEngine,
    config_of,
    result_here,
    sampling,
    started_llm,
    without_weights,
)
from paged.runtime.bench.options import LatencyOptions
from paged.runtime.bench.publish import publish
from paged.runtime.bench.results import EngineReport, RunResult, Times
from paged.runtime.bench.workloads import BenchRequest, IdRange, random_requests
from paged.runtime.config import EngineConfig
from paged.runtime.flags import read_flags
from paged.runtime.outputs import RequestOutput

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class LatencyReport:
    """A batch that ran many times.

    Attributes:
        start_seconds: to load and compile; not part of the rest.
        latencies: seconds of each run.
        decode_seconds: in each run, per output token of the sequence that was prefilled last: while
            it decodes all do, so that this is the time of one decode step. 0 for single tokens.
    """

    start_seconds: float
    latencies: list[float]
    decode_seconds: list[float]
    engine: EngineReport

    @property
    def mean(self) -> float:
        return float(np.mean(self.latencies))

    @property
    def percentiles(self) -> dict[int, float]:
        """Seconds by percentile."""
        values = np.percentile(self.latencies, _PERCENTILES)
        return {each: float(value) for each, value in zip(_PERCENTILES, values, strict=True)}

    @property
    def decode_step_ms(self) -> float:
        """Median over the runs."""
        return float(np.median(self.decode_seconds)) * 1000

    def lines(self) -> Iterator[str]:
        yield f"Start-up: {self.start_seconds:.2f} s"
        yield f"Avg latency: {self.mean:.4f} seconds"
        for percentile, seconds in self.percentiles.items():
            yield f"{percentile}% percentile latency: {seconds:.4f} seconds"
        yield f"Decode step: {self.decode_step_ms:.3f} ms (median)"
        yield from self.engine.lines()

    def as_json(self) -> dict[str, Any]:
        return {
            "avg_latency": self.mean,
            "latencies": self.latencies,
            "percentiles": self.percentiles,
            "decode_step_ms": self.decode_step_ms,
            "start_seconds": self.start_seconds,
            "engine": self.engine.as_json(),
        }


def run_latency(args: argparse.Namespace) -> int:
    """Returns 0.

    Raises:
        ConfigError, InvalidRequest: the run cannot be made as asked.
    """
    options = read_flags(LatencyOptions, args)
    config = config_of(args)
    report = measure(config, options)
    run = _run(report, options)
    result = result_here("latency", without_weights(config).name, options, [run])
    publish(report.lines(), result, options, report.as_json())
    return 0


def measure(config: EngineConfig, options: LatencyOptions) -> LatencyReport:
    """Start an engine and give it the same batch again and again."""
    vocab_size = without_weights(config).config.vocab_size
    batch = random_requests(
        options.batch_size,
        options.input_len,
        options.output_len,
        seed=config.seed,
        ids=IdRange.below(vocab_size),
    )
    detokenize = not (config.skip_tokenizer_init or options.disable_detokenize)
    with started_llm(config) as engine:
        for _ in trange(options.num_iters_warmup, desc="Warm-up", disable=options.disable_tqdm):
            _run_batch(engine, batch, options.n, detokenize)
        with EngineMeter(engine.stats) as meter:
            runs = [
                _run_batch(engine, batch, options.n, detokenize)
                for _ in trange(options.num_iters, desc="Runs", disable=options.disable_tqdm)
            ]
    latencies, decodes = zip(*runs, strict=True)
    return LatencyReport(engine.start_seconds, list(latencies), list(decodes), meter.report)


def _run(report: LatencyReport, options: LatencyOptions) -> RunResult:
    """All runs of the batch as one: the time to the end is that of the batch."""
    batches, seconds = len(report.latencies), sum(report.latencies)
    requests = batches * options.batch_size
    inputs, outputs = requests * options.input_len, requests * options.n * options.output_len
    spread = {"e2el": report.latencies, "tpot": report.decode_seconds}
    times = {name: Times.of(values) for name, values in spread.items()}
    settings = ("batch_size", "input_len", "output_len", "n", "num_iters")
    return RunResult(
        name="latency",
        duration=seconds,
        num_completed=requests,
        num_failed=0,
        num_input_tokens=inputs,
        num_output_tokens=outputs,
        requests_per_second=requests / seconds,
        output_tokens_per_second=outputs / seconds,
        total_tokens_per_second=(inputs + outputs) / seconds,
        times={name: each for name, each in times.items() if each is not None},
        settings={name: getattr(options, name) for name in settings},
        engine=report.engine,
    )


def _run_batch(
    engine: StartedEngine, batch: list[BenchRequest], n: int, detokenize: bool
) -> tuple[float, float]:
    """Seconds of the batch, and of a decode step in it."""
    params = [
        sampling(request.num_output_tokens, n=n, ignore_eos=True, detokenize=detokenize)
        for request in batch
    ]
    begin = time.perf_counter()
    outputs = engine.generate([request.prompt for request in batch], params, False)
    return time.perf_counter() - begin, decode_seconds(outputs)


def decode_seconds(outputs: list[RequestOutput]) -> float:
    """Per token after the first, of the request whose first token came last."""
    last = max(outputs, key=lambda output: output.metrics.first_token_time or 0.0)
    begin, end = last.metrics.first_token_time, last.metrics.finished_time
    following = len(last.outputs[0].token_ids) - 1
    if begin is None or end is None or following < 1:
        return 0.0
    return (end - begin) / following
