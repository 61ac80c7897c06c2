"""What is simulated, made of what the command line says: the engine, and what comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paged.runtime.bench.load import arrival_times
from paged.runtime.bench.options import MOST, ArrivalOptions
from paged.runtime.bench.results import StepTime, read_result
from paged.runtime.bench.workload_file import read_log, read_workload
from paged.runtime.bench.workloads import BenchRequest, IdRange
from paged.runtime.errors import ConfigError
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.simulation.fleet import EngineShape
from paged.runtime.simulation.measured import MEASURED, MeasuredEngine
from paged.runtime.simulation.options import RECORDED, EngineOptions, TraceOptions
from paged.runtime.simulation.step_times import MeasuredStep
from paged.runtime.simulation.traces import (
    Agents,
    Alike,
    Bursts,
    Chats,
    Tree,
    Turn,
    Workload,
    num_turns,
    trees,
)

_LONGEST = 8192  # tokens of a sequence, where nothing says more


def engine_of(options: EngineOptions) -> MeasuredEngine:
    """The measured engine, with what is said of it.

    Raises:
        ConfigError: nobody measured it, or the pool is not told.
    """
    known = MEASURED.get(options.step_times)
    if known is None:
        path = Path(options.step_times)
        if not path.is_file():
            raise ConfigError(
                f"--step-times must be {', '.join(MEASURED)} or a file of `paged bench steps`, got "
                f"{options.step_times!r}"
            )
        known = engine_in(path, options)
    return replace(
        known,
        num_pages=options.num_pages or known.num_pages,
        page_size=options.block_size or known.page_size,
        max_num_seqs=options.max_num_seqs or known.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or known.max_num_batched_tokens,
        max_model_len=options.max_model_len or known.max_model_len,
    )


def engine_in(path: Path, options: EngineOptions) -> MeasuredEngine:
    """The engine whose steps a result of `paged bench steps` holds. Raises ConfigError."""
    result = read_result(path)
    if not result.steps:
        raise ConfigError(f"{path} is of `paged bench {result.command}`: measure the steps")
    if options.num_pages is None:
        raise ConfigError("--step-times FILE needs --num-pages, which the engine logs at its start")
    page_size = options.block_size or 16
    decode = [each.num_tokens for each in result.steps if _is_decode(each)]
    return MeasuredEngine(
        source=f"{result.model} on {result.device or 'an unknown device'}, {result.date}; {path}",
        steps=tuple(map(measured_step, result.steps)),
        knots=None,
        num_pages=options.num_pages,
        max_num_seqs=max(decode, default=1),
        max_num_batched_tokens=max(each.num_tokens for each in result.steps),
        max_model_len=min(_LONGEST, (options.num_pages - 1) * page_size),
        page_size=page_size,
        fewest_rows=min(decode, default=1),
    )


def measured_step(step: StepTime) -> MeasuredStep:
    """A step as the model of step times counts it."""
    if _is_decode(step):
        return MeasuredStep(step.num_tokens, step.rows * step.context_tokens, 0.0, step.ms)
    pairs = step.num_tokens * (step.context_tokens + step.num_tokens / step.rows / 2)
    return MeasuredStep(step.num_tokens, 0.0, pairs, step.ms)


def shape_of(engine: MeasuredEngine, options: EngineOptions) -> EngineShape:
    """A replica. Raises ConfigError where the limits do not fit."""
    try:
        scheduling = SchedulerConfig(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            policy=options.scheduling_policy,
        )
        shape = EngineShape(
            scheduling=scheduling,
            step_times=engine.step_times(),
            num_pages=engine.num_pages,
            page_size=engine.page_size,
            enable_prefix_caching=options.enable_prefix_caching,
            fewest_rows=engine.fewest_rows,
        )
        shape.start()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return shape


def trace_of(options: TraceOptions) -> list[Tree]:
    """What comes, in its order. Raises ConfigError."""
    if options.trace in RECORDED:
        return _recorded(options)
    if options.trace_path is not None:
        raise ConfigError(
            f"--trace-path says nothing of --trace {options.trace}, only of {', '.join(RECORDED)}"
        )
    bursts = _bursts(options)
    seconds = bursts.even(options.seconds) if bursts else options.seconds
    wanted = max(round(options.request_rate * seconds), 1)
    if wanted > MOST:
        raise ConfigError(
            f"--request-rate {options.request_rate:g} for --seconds {options.seconds:g} makes "
            f"{wanted:,} requests, and at most {MOST:,} are simulated: lower one of them"
        )
    made = trees(_workload(options), wanted, options.seed)
    rate = len(made) * options.request_rate / sum(num_turns(each.first) for each in made)
    load = ArrivalOptions(request_rate=rate, burstiness=options.burstiness)
    times = arrival_times(len(made), load, options.seed)
    times -= times[0]  # somebody comes, however few
    if bursts:
        times = bursts.warp(times)
    return [replace(tree, seconds=at) for tree, at in zip(made, times.tolist(), strict=True)]


def _workload(options: TraceOptions) -> Workload:
    if options.trace == "random":
        return Alike(options.input_len, options.output_len)
    return Chats() if options.trace == "chat" else Agents()


def _bursts(options: TraceOptions) -> Bursts | None:
    if options.burst_factor == 1:
        return None
    try:
        return Bursts(options.burst_factor, options.burst_seconds, options.burst_every)
    except ValueError as error:
        raise ConfigError(f"--burst-factor, --burst-seconds, --burst-every: {error}") from error


def _recorded(options: TraceOptions) -> list[Tree]:
    if options.trace_path is None:
        raise ConfigError(f"--trace {options.trace} needs --trace-path: the file that it is in")
    path, ids = Path(options.trace_path), IdRange()
    if options.trace == "log":
        requests = read_log(path, ids=ids, seed=options.seed)
    else:
        requests = read_workload(path, ids=ids, seed=options.seed)
    kept = [each for each in requests if each.arrival < options.seconds]
    return sorted(map(_single, kept), key=lambda tree: tree.seconds)


def _single(request: BenchRequest) -> Tree:
    if isinstance(request.prompt, str):
        raise ConfigError(
            f"A trace needs token ids or input_tokens, got a text: {request.prompt[:40]!r}"
        )
    return Tree(request.arrival, request.prompt, Turn(0, request.num_output_tokens))


def _is_decode(step: StepTime) -> bool:
    return step.rows == step.num_tokens


def describe(engine: MeasuredEngine, trace: Sequence[Tree], options: TraceOptions) -> list[str]:
    """What is simulated, in lines."""
    errors = np.abs(engine.step_times().errors(engine.steps))
    return [
        f"Steps as of {engine.source}; the model is {errors.mean():.1%} off on average, "
        f"{errors.max():.1%} at most",
        f"{sum(num_turns(each.first) for each in trace):,} requests of {len(trace):,} "
        f"{'conversations' if options.trace == 'chat' else 'trees'}, {options.trace}, "
        f"seed {options.seed}",
    ]
