"""When requests are sent, and sending them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

import numpy as np

from paged.runtime.bench.metrics import RequestRecord, ServeSummary
from paged.runtime.bench.options import ArrivalOptions
from paged.runtime.bench.workloads import BenchRequest
from paged.runtime.errors import ConfigError

Send = Callable[[BenchRequest], Awaitable[RequestRecord]]


def moments(requests: Sequence[BenchRequest], load: ArrivalOptions, seed: int | None) -> np.ndarray:
    """Seconds after the start at which each request is sent: their own, unless the load has a rate.

    Raises:
        ConfigError: see `arrival_times`.
    """
    if np.isinf(load.request_rate) and load.ramp_up_strategy is None:
        return np.array([each.arrival for each in requests])
    return arrival_times(len(requests), load, seed)


def arrival_times(num_requests: int, load: ArrivalOptions, seed: int | None) -> np.ndarray:
    """Seconds after the start at which each request is sent.

    Gaps are gamma-distributed with shape `burstiness` (1 makes a Poisson process). At a steady rate
    they are scaled to the rate asked for, so that chance does not decide how long a run takes.

    Raises:
        ConfigError: a ramp without its rates, or with a rate of its own; or gaps that are no time.
    """
    rates = _rates(num_requests, load)
    if np.isinf(rates).any():
        return np.zeros(num_requests)
    rng = np.random.default_rng([seed or 0, 1])
    gaps = rng.gamma(load.burstiness, 1 / (rates * load.burstiness))
    times = np.cumsum(gaps)
    if not 0 < times[-1] < np.inf:
        raise ConfigError(
            f"--burstiness {load.burstiness:g} leaves no time between requests, or no end to it: "
            "give one nearer to 1"
        )
    if load.ramp_up_strategy is None:
        times *= num_requests / load.request_rate / times[-1]
    return times


def _rates(num_requests: int, load: ArrivalOptions) -> np.ndarray:
    """Requests per second around each request."""
    if load.ramp_up_strategy is None:
        return np.full(num_requests, load.request_rate)
    start, end = load.ramp_up_start_rps, load.ramp_up_end_rps
    if start is None or end is None or not np.isinf(load.request_rate):
        raise ConfigError(
            "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and no "
            "--request-rate"
        )
    spaced = np.linspace if load.ramp_up_strategy == "linear" else np.geomspace
    return spaced(start, end, num_requests)


async def send_all(
    requests: Sequence[BenchRequest],
    times: Sequence[float] | np.ndarray,
    send: Send,
    *,
    max_concurrency: int | None,
    on_done: Callable[[], object],
) -> ServeSummary:
    """Send each request at its time, or as soon after as fewer than max_concurrency are running."""
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def send_one(request: BenchRequest) -> RequestRecord:
        async with limit:
            record = await send(request)
        on_done()
        return record

    begin, worked = time.perf_counter(), time.thread_time()
    tasks: dict[int, asyncio.Task[RequestRecord]] = {}
    async with asyncio.TaskGroup() as group:
        for number in np.argsort(times, kind="stable").tolist():
            wait = begin + times[number] - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks[number] = group.create_task(send_one(requests[number]))
    return ServeSummary(
        [tasks[number].result() for number in range(len(requests))],
        duration=time.perf_counter() - begin,
        client_seconds=time.thread_time() - worked,
    )
