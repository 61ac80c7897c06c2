"""`paged bench steps`: how long each compiled step takes, and how near it comes to the device."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from paged.models.config import resolve_dtype
from paged.runtime.about import StartClock
from paged.runtime.bench.ceilings import measure_ceilings
from paged.runtime.bench.offline import config_of, result_here
from paged.runtime.bench.options import StepOptions
from paged.runtime.bench.publish import publish
from paged.runtime.bench.results import BenchResult, Ceilings, StepTime
from paged.runtime.bench.tables import steps_table
from paged.runtime.buckets import Bucket
from paged.runtime.config import EngineConfig
from paged.runtime.engine import find_model
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.plan import PageUpdate, Row, StepPlan
from paged.runtime.planning.work import Work, work_of
from paged.runtime.runner import SlotRequest, StepRunner
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.sequence import Sequence as Running
from paged.runtime.sequence import SequenceLimits
from paged.runtime.setup import claim_devices, prepare
from paged.runtime.steps import StepShapes

# Steps that are enqueued before the last is waited for, as an engine enqueues them ahead.
_IN_A_ROW = 4
_SHORTEST_CHUNK = 16


@dataclass(frozen=True)
class Case:
    """A full step: its bucket, the tokens of each row, and what comes before them."""

    bucket: Bucket
    lengths: tuple[int, ...]
    context: int


def run_steps(args: argparse.Namespace) -> int:
    """Returns 0.

    Raises:
        ConfigError: the engine cannot be made as asked, or no step is of a bucket that is named.
    """
    options = read_flags(StepOptions, args)
    result = measure_steps(config_of(args), options)
    publish(step_lines(result), result, options)
    return 0


def measure_steps(config: EngineConfig, options: StepOptions) -> BenchResult:
    """Start the device side of an engine, and time its steps. Raises ConfigError."""
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            "--pipeline-parallel-size is not for this benchmark, which counts what all layers do: "
            "leave it out"
        )
    source = find_model(config)
    # Before the pages take the device's memory.
    device = claim_devices(config)[0]
    dtype = resolve_dtype(config.dtype, source.config, device.platform)
    ceilings = measure_ceilings(dtype)
    runner, _, _ = prepare(config, source, StartClock(), progress=not options.disable_tqdm)
    try:
        cases = list(_cases(runner.shapes, options))
        if not cases:
            raise ConfigError(_nothing_left(runner.shapes, options))
        work = work_of(source.config, runner.shapes, dtype, device)
        steps = tuple(_measure(runner, work, ceilings, cases, options))
    finally:
        runner.close()
    return replace(result_here("steps", source.name, options), steps=steps, ceilings=ceilings)


def step_lines(result: BenchResult) -> Iterator[str]:
    """What is printed of steps."""
    ceilings = result.ceilings
    assert ceilings is not None, "steps are measured with the device's ceilings"
    yield (
        f"{result.device}: reads {ceilings.bytes_per_second / 1e9:.1f} GB/s, multiplies "
        f"{ceilings.flops_per_second / 1e9:.1f} GFLOP/s"
    )
    yield from steps_table("", result.steps).lines()


def _cases(shapes: StepShapes, options: StepOptions) -> Iterator[Case]:
    """The smallest bucket first; contexts that fit into neither model nor pages are left out."""
    for bucket in sorted(shapes.buckets.all(), key=lambda each: (not each.decode_only, each)):
        if options.buckets and bucket.name not in options.buckets:
            continue
        for context in sorted(set(options.contexts)):
            for lengths in _rows(bucket, context, shapes.max_model_len):
                case = Case(bucket, lengths, context)
                if _pages(case, shapes) * len(shapes.cache.windows) < shapes.cache.num_pages:
                    yield case


def _nothing_left(shapes: StepShapes, options: StepOptions) -> str:
    names = " ".join(options.buckets) or "all"
    contexts = " ".join(map(str, options.contexts))
    known = ", ".join(bucket.name for bucket in shapes.buckets.all())
    return (
        f"No step is left by --buckets {names} and --contexts {contexts}: there are {known}, and "
        f"sequences of {shapes.max_model_len} tokens at most"
    )


def _rows(bucket: Bucket, context: int, max_model_len: int) -> Iterator[tuple[int, ...]]:
    """The tokens of each row: of chunks as few as may be, and without a context also many."""
    room = max_model_len - context
    if bucket.decode_only:
        if room > 0 and context > 0:
            yield (1,) * bucket.num_rows
        return
    fewest = -(-bucket.num_tokens // room) if room > 1 else bucket.num_rows + 1
    most = min(bucket.num_rows, bucket.num_tokens // _SHORTEST_CHUNK)
    counts = {fewest} | ({most} if context == 0 else set())
    for count in sorted(counts):
        if fewest <= count <= bucket.num_rows:
            yield tuple(map(len, np.array_split(np.arange(bucket.num_tokens), count)))


def _pages(case: Case, shapes: StepShapes) -> int:
    """Of all rows, in one group of layers."""
    size = shapes.cache.page_size
    return sum(-(-(case.context + length) // size) for length in case.lengths)


def _measure(
    runner: StepRunner,
    work: Work,
    ceilings: Ceilings,
    cases: Sequence[Case],
    options: StepOptions,
) -> Iterator[StepTime]:
    for case in tqdm(cases, desc="Steps", disable=options.disable_tqdm, unit="step"):
        seconds = _step_seconds(runner, case, options)
        flops, moved = (count(case.lengths, case.context) for count in (work.flop, work.bytes))
        counted = runner.counted(case.bucket)
        yield StepTime(
            bucket=case.bucket.name,
            num_tokens=case.bucket.num_tokens,
            rows=len(case.lengths),
            context_tokens=case.context,
            ms=1e3 * seconds,
            flops=flops,
            bytes=moved,
            xla_flops=counted.get("flops"),
            xla_bytes=counted.get("bytes accessed"),
            bandwidth_fraction=moved / seconds / ceilings.bytes_per_second,
            flops_fraction=flops / seconds / ceilings.flops_per_second,
        )


def _step_seconds(runner: StepRunner, case: Case, options: StepOptions) -> float:
    """The median of some runs, fewer if they take longer than they may."""
    plan = _plan(case, runner.shapes)
    for row in plan.rows:
        request = SlotRequest(SamplingParams(temperature=0.0), seed=0, stop_token_ids=frozenset())
        runner.admit(row.sequence, request)
    runner.launch(plan).read()  # its page tables are on the device from here on
    plan, begun = replace(plan, page_updates=()), time.perf_counter()
    runs: list[float] = []
    while len(runs) < options.num_iters:
        started = time.perf_counter()
        for _ in range(_IN_A_ROW):
            launched = runner.launch(plan)
        launched.read()
        ended = time.perf_counter()
        runs.append((ended - started) / _IN_A_ROW)
        if ended - begun > options.seconds:
            break
    return statistics.median(runs)


def _plan(case: Case, shapes: StepShapes) -> StepPlan:
    """A step of sequences whose pages lie scattered, no page in two places."""
    cache, buckets = shapes.cache, shapes.buckets
    pages = iter(np.random.default_rng(0).permutation(np.arange(1, cache.num_pages)).tolist())
    rows, updates = [], []
    for slot, length in enumerate(case.lengths):
        total = case.context + length
        tokens = [1 + position % (shapes.model.vocab_size - 1) for position in range(total)]
        sequence = Running(slot, tokens, SequenceLimits(max_tokens=1), slot=slot)
        rows.append(Row(sequence, slot, case.context, length, samples=True))
        updates += [
            PageUpdate(group * buckets.max_num_seqs + slot, entry, next(pages))
            for group in range(len(cache.windows))
            for entry in range(-(-total // cache.page_size))
        ]
    sequences = tuple(row.sequence for row in rows)
    return StepPlan(tuple(rows), sequences, tuple(updates), copies=())
