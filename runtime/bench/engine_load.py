"""A workload on an engine in this process, timed as its callers see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import uvloop
from tqdm import tqdm

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.bench.load import Send, send_all
from paged.runtime.bench.metrics import RequestRecord, ServeSummary
from paged.runtime.bench.offline import EngineMeter
from paged.runtime.bench.results import RunResult, Value
from paged.runtime.bench.run_results import run_result
from paged.runtime.bench.workloads import BenchRequest, reversed_prompt
from paged.runtime.config import EngineConfig
from paged.runtime.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
)
from paged.runtime.outputs import RequestOutput
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams

_SECONDS_TO_SETTLE = 10.0
_REFUSALS = (DeadlineExceeded, InvalidRequest, Overloaded)


def run_workload(
    engine: AsyncEngine,
    requests: Sequence[BenchRequest],
    *,
    name: str = "run",
    times: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    goals: Mapping[str, float] | None = None,
    ignore_eos: bool = True,
    settings: Mapping[str, Value] | None = None,
    num_warmups: int = 0,
    empty_cache: bool = False,
    progress: bool = False,
) -> RunResult:
    """Send every request at its time, wait for all answers, and tell how it went.

        engine = AsyncEngine(model, max_num_seqs=64)
        requests = read_workload(Path("workload.jsonl"), encode=engine.tokenizer.encode)
        run = run_workload(engine, requests, goals={"ttft": 500, "tpot": 30})
        run.goodput, run.output_tokens_per_second, run.times["e2el"].p99
        engine.shutdown()

    It runs an event loop of its own: call it from a thread that has none, with an engine that
    serves nobody else meanwhile.

    Args:
        requests: prompts as text or token ids, greedily continued.
        name: what reports call the run.
        times: seconds after the start at which each is sent; default their own `arrival`.
        max_concurrency: more than so many wait here, and their times count from when they are sent.
        goals: limits in milliseconds of ttft, tpot or e2el, for the goodput.
        ignore_eos: generate all tokens asked for, whatever the model says.
        settings: what to keep beside the figures.
        num_warmups: requests sent before and not counted, their prompts turned round: programs and
            pages are slower the first time that they are used.
        empty_cache: forget first what earlier runs left in the prefix cache.
        progress: show a bar.

    Returns:
        A run in which requests that the engine refused are counted as failed.

    Raises:
        EngineDead: the engine died meanwhile.
        ConfigError: there are no requests.
        TimeoutError: with empty_cache, if requests are still running.
    """
    if not requests:
        raise ConfigError("A workload needs at least one request")
    send = partial(_stream, engine, ignore_eos)
    if num_warmups > 0:
        chosen = [reversed_prompt(each) for each in requests[:: -(-len(requests) // num_warmups)]]
        _run(chosen, [0.0] * len(chosen), send, max_concurrency, lambda: None)
    if empty_cache:
        uvloop.run(_empty_cache(engine))
    times = [each.arrival for each in requests] if times is None else times
    with (
        tqdm(total=len(requests), desc=name, disable=not progress, unit="req") as bar,
        EngineMeter(engine.stats) as meter,
    ):
        summary = _run(requests, times, send, max_concurrency, bar.update)
    if any(record.error for record in summary.records):
        uvloop.run(_living(engine))
    summary = ServeSummary(
        summary.records, summary.duration, tuple((goals or {}).items()), summary.client_seconds
    )
    return run_result(summary, name, settings=settings, engine=meter.report)


@contextmanager
def running_engine(config: EngineConfig) -> Iterator[AsyncEngine]:
    """An engine in this process, shut down at the end. Raises ConfigError."""
    engine = AsyncEngine.from_config(config)
    try:
        yield engine
    finally:
        engine.shutdown()


async def _living(engine: AsyncEngine) -> None:
    """Raises EngineDead of an engine whose requests ended because it did."""
    await engine.look()


async def _empty_cache(engine: AsyncEngine) -> None:
    """The last request's pages are given back with the step after its last token, soon."""
    async with asyncio.timeout(_SECONDS_TO_SETTLE):
        while not await engine.reset_prefix_cache():
            await asyncio.sleep(0.01)


def _run(
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    send: Send,
    max_concurrency: int | None,
    on_done: Callable[[], object],
) -> ServeSummary:
    load = send_all(requests, times, send, max_concurrency=max_concurrency, on_done=on_done)
    try:
        return uvloop.run(load)
    except* EngineDead as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[EngineDead]) -> BaseException:
    """Every request in flight fails of the same."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


async def _stream(engine: AsyncEngine, ignore_eos: bool, request: BenchRequest) -> RequestRecord:
    """Run one request; a refusal is told by the record's `error`."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=request.num_output_tokens,
        ignore_eos=ignore_eos,
        output_kind=RequestOutputKind.DELTA,
    )
    # An engine that serves in order of arrival takes no other priority.
    priority = 0 if engine.config.scheduling_policy == "fcfs" else request.priority
    record = RequestRecord(
        start=time.perf_counter(),
        num_input_tokens=request.num_input_tokens,
        counted=True,
        kind=request.kind,
    )
    try:
        async for output in engine.generate(request.prompt, params, priority=priority):
            _note(record, output)
    except _REFUSALS as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


def _note(record: RequestRecord, output: RequestOutput) -> None:
    [sequence] = output.outputs
    if sequence.token_ids:
        record.chunk_times.append(time.perf_counter())
    record.num_input_tokens = len(output.prompt_token_ids)
    record.num_output_tokens += len(sequence.token_ids)
    begun, came = output.metrics.first_scheduled_time, output.metrics.arrival_time
    record.queue = None if begun is None else begun - came
    if sequence.finish_reason in ("abort", "error", "timeout"):
        record.error = f"ended with finish_reason {sequence.finish_reason!r}: {sequence.error}"
