"""The search for the fastest tilings: what is compiled and timed when, and what wins.

It knows neither a GPU nor its clock: those are a `Timer`'s.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import pairwise
from typing import Any, Protocol

from paged.attention.tiling import DecodeTiling, PrefillTiling, Tilings
from paged.attention.tuning.workloads import Case, Layer

logger = logging.getLogger(__name__)

# Compiling takes most of the time there is; timing is a few milliseconds each, but one by one.
_SHARE_TO_COMPILE = 0.7
# How much faster than the rule's tiling another must be to be preferred: what noise does not do.
_GAIN = 1.02

Tiling = DecodeTiling | PrefillTiling
Found = dict[Case, dict[Tiling, tuple[float, ...]]]
"""For each case the tilings that were timed, in the order of its candidates: microseconds of each
of its workloads."""


class Timer[Program](Protocol):
    """What runs attention, in programs of its own kind."""

    def compile(self, case: Case, tiling: Tiling, *, may_spill: bool) -> Program:
        """A program for the steps of a case. Raises what the compiler raises, or that registers
        spill where they must not. Called by several threads at a time."""

    def microseconds(self, case: Case, program: Program) -> tuple[float, ...]:
        """What attention takes in each workload of a case."""


def search[Program](
    layer: Layer,
    cases: Sequence[Case],
    timer: Timer[Program],
    *,
    seconds: float,
    advance: Callable[[int], object],
    now: Callable[[], float] = time.monotonic,
) -> Found:
    """Time the candidates of all cases, as many as there is time for.

    Args:
        seconds: after which no other is begun.
        advance: called with 1 as each of `num_candidates` is compiled, or does not compile.
        now: seconds.

    Raises:
        RuntimeError: not one could be timed.
    """
    deadline = now() + seconds
    programs = _compiled(layer, cases, timer, _SHARE_TO_COMPILE * seconds, advance)
    found: Found = {case: {} for case in cases}
    reason = "none was compiled in time"
    for (case, tiling), program in programs.items():
        if now() >= deadline:
            reason = "there was no time left"
            break
        try:
            found[case][tiling] = timer.microseconds(case, program)
        except Exception as error:  # whatever the device or its clock does not do
            reason = _one_line(error)
            logger.debug("%s with %s does not run: %s", case, tiling, reason)
    if not any(found.values()):
        raise RuntimeError(f"no attention kernel could be timed: {reason}")
    return found


def num_candidates(layer: Layer, cases: Sequence[Case]) -> int:
    """How many a search has to compile."""
    return sum(len(case.candidates(layer)) for case in cases)


def _compiled[Program](
    layer: Layer,
    cases: Sequence[Case],
    timer: Timer[Program],
    seconds: float,
    advance: Callable[[int], object],
) -> dict[tuple[Case, Tiling], Program]:
    """The programs that compile within so many seconds, the likeliest first."""
    jobs = [
        (place, case, tiling)
        for case in cases
        for place, tiling in enumerate(case.candidates(layer))
    ]
    jobs.sort(key=lambda job: job[0])
    threads = ThreadPoolExecutor(max(2, os.cpu_count() or 2))
    # What the rule says is what runs otherwise, however it compiles.
    futures: dict[tuple[Case, Tiling], Future[Program]] = {
        (case, tiling): threads.submit(timer.compile, case, tiling, may_spill=place == 0)
        for place, case, tiling in jobs
    }
    # Those under way when time is up end on their own, for nobody.
    with suppress(TimeoutError):
        for _ in as_completed(futures.values(), timeout=seconds):
            advance(1)
    threads.shutdown(wait=False, cancel_futures=True)
    done = {job: each for job, each in futures.items() if each.done() and not each.cancelled()}
    for (case, tiling), future in done.items():
        if error := future.exception():
            logger.debug("%s with %s does not compile: %s", case, tiling, _one_line(error))
    return {job: future.result() for job, future in done.items() if not future.exception()}


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def fastest(layer: Layer, found: Found) -> Tilings:
    """The best tiling of each case; the rule's own where none was timed."""
    decode: list[tuple[int, Any]] = []
    prefill: list[tuple[int, Any]] = []
    for case, timed in sorted(found.items(), key=lambda item: item[0].size):
        entries = decode if case.decode else prefill
        entries.append((case.size, _best(timed, case.candidates(layer)[0])))
    return Tilings(_joined(decode), _joined(prefill))


def _best(timed: dict[Tiling, tuple[float, ...]], by_rule: Tiling) -> Tiling:
    """The fastest over all workloads, each of which counts alike."""

    def score(tiling: Tiling) -> float:
        times = timed[tiling]
        return sum(map(math.log, times)) / len(times)

    best = min(timed, key=score, default=by_rule)
    if by_rule in timed and score(by_rule) - score(best) < math.log(_GAIN):
        return by_rule
    return best


def _joined(entries: list[tuple[int, Any]]) -> tuple[tuple[int, Any], ...]:
    """Without those whose tiling is that of the next size."""
    kept = [one for one, after in pairwise(entries) if one[1] != after[1]]
    return (*kept, *entries[-1:])
