"""Compiling every program of an engine ahead, and knowing what memory they take."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from paged.cache import PagedKVCache, copy_pages
from paged.models.loading.progress import progress
from paged.runtime.buckets import Bucket
from paged.runtime.program_store import load_or_compile, named_apart
from paged.runtime.sampler import SamplingMode, load_history, load_rules
from paged.runtime.steps import (
    COPY_ROOM,
    HISTORY_ROOM,
    NUM_RULES,
    UPDATE_ROOM,
    StepShapes,
    forward,
    sample,
    score,
    update_tables,
)

logger = logging.getLogger(__name__)

Key = tuple[Any, ...]
"""Names a program: its kind, then what it is specialised for."""


class Programs:
    """Every compiled program of an engine, by kind and shape.

    Asking for one that was not compiled is a KeyError: nothing is ever compiled while serving.
    """

    def __init__(self, shapes: StepShapes, params: Any, *, show_progress: bool) -> None:
        """Compile everything, in parallel threads; tell how it gets on if asked to."""
        self._compiled: dict[Key, Compiled] = {}
        jobs = dict(_jobs(shapes, abstract(params)))
        with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as threads:
            futures = {threads.submit(_compile, shapes, key, job): key for key, job in jobs.items()}
            with progress(len(futures), "Compiling", " programs", show=show_progress) as advance:
                for done in as_completed(futures):
                    self._compiled[futures[done]] = done.result()
                    advance(1)

    def __getitem__(self, key: Key) -> Compiled:
        return self._compiled[key]


def step_memory(shapes: StepShapes, params: Any) -> int:
    """Bytes of device memory that steps need beside parameters, state and pages.

    As XLA reports it for the largest programs: temporaries of one, and the outputs of the two steps
    that can be in flight.
    """
    jobs = dict(_jobs(shapes, abstract(params)))
    rows = shapes.buckets.max_num_seqs
    largest = (
        ("forward", Bucket(rows, rows, True)),
        ("forward", shapes.buckets.all()[0]),
        ("sample", shapes.buckets.sampling[-1], SamplingMode.LOGPROBS),
        ("score", shapes.buckets.mixed[-1]),
    )
    with ThreadPoolExecutor(len(largest)) as threads:
        programs = threads.map(lambda key: _compile(shapes, key, jobs[key]), largest)
        reports = [_report(program) for program in programs]
    temporary = max(report.temp_size_in_bytes for report in reports)
    outputs = max(report.output_size_in_bytes - report.alias_size_in_bytes for report in reports)
    return int(temporary + 2 * outputs)


def abstract(tree: Any) -> Any:
    """The shapes, dtypes and shardings of a pytree's arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
        tree,
    )


def _report(program: Compiled) -> Any:
    report = program.memory_analysis()
    assert report is not None, "this backend does not report the memory of its programs"
    return report


# Tracing and lowering are Python: threads that did both at once would only stand in the way of each
# other, and of those that compile.
_lowering = threading.Lock()

Job = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A function, its abstract arguments, and which of them are donated."""


def _compile(shapes: StepShapes, key: Key, job: Job) -> Compiled:
    function, args, donated = job
    fixed = (
        shapes.model,
        shapes.cache,
        shapes.buckets,
        shapes.max_model_len,
        shapes.backend,
        shapes.tilings,
    )

    def make() -> Compiled:
        named = named_apart(function, key[0])
        with _lowering:
            started = time.perf_counter()
            lowered = jax.jit(named, donate_argnums=donated).lower(*args)
        lower_seconds = time.perf_counter() - started
        program = lowered.compile()
        seconds = time.perf_counter() - started
        logger.debug("%s: %.1f s, %.1f of them to lower it", key, seconds, lower_seconds)
        return program

    return load_or_compile((key, fixed, args, donated), make)


def _jobs(shapes: StepShapes, params: Any) -> Iterator[tuple[Key, Job]]:
    """Every program, the slowest to compile first."""
    cache = PagedKVCache.shapes(shapes.cache)
    slots = jax.eval_shape(shapes.slot_state)
    state = jax.eval_shape(shapes.sampler_state)

    def forward_job(bucket: Bucket) -> Job:
        step = partial(forward, shapes=shapes, bucket=bucket)
        return step, (params, cache, slots, _int32(shapes.layout(bucket).size)), (1, 2)

    smallest, inputs, _ = forward_job(shapes.buckets.all()[-1])
    out = jax.eval_shape(smallest, *inputs)[2]
    for bucket in shapes.buckets.all():
        yield ("forward", bucket), forward_job(bucket)
    for size in shapes.buckets.scoring:
        hidden = jax.ShapeDtypeStruct((size, out.last_hidden.shape[1]), out.last_hidden.dtype)
        scored = (params, hidden, _int32(size))
        yield ("score", size), (partial(score, shapes=shapes), scored, ())
    # Mode by mode, so that what the modes of a size have in common is tuned once for all of them.
    for mode in SamplingMode:
        for rows in reversed(shapes.buckets.sampling):
            kept = state if mode >= SamplingMode.ADJUSTED else None
            args = (params, slots, kept, out.last_hidden, out.sampling)
            sampler = partial(sample, shapes=shapes, num_rows=rows, mode=mode)
            yield ("sample", rows, mode), (sampler, args, (1, 2))
    yield ("copy_pages",), (copy_pages, (cache, _int32(COPY_ROOM), _int32(COPY_ROOM)), (0,))
    yield ("update_tables",), (update_tables, (slots, _int32(UPDATE_ROOM, 3)), (0,))
    number, flag = _int32(), jax.ShapeDtypeStruct((), jnp.bool_)
    history = (state, number, _int32(HISTORY_ROOM), number, flag)
    yield ("load_history",), (load_history, history, (0,))
    rules = (_int32(NUM_RULES), jax.ShapeDtypeStruct((NUM_RULES,), jnp.float32), _int32(NUM_RULES))
    yield ("load_rules",), (load_rules, (state, number, *rules), (0,))


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
