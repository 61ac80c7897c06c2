"""Compiling many programs at once, each only where none is kept on disk."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from paged.runtime.program_store import kept_once, load_or_compile, named_apart

logger = logging.getLogger(__name__)

Key = tuple[Any, ...]
"""Names a program: its kind, then what it is specialised for."""

Job = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A function, its abstract arguments, and which of them are donated."""

Submit = Callable[[Key, Job], Future[Compiled]]


@contextmanager
def compiler(fixed: Any) -> Iterator[Submit]:
    """Compiles what it is handed, many at a time; waits for all of it at the end.

    After an error it waits only for what is being compiled, and the rest is cancelled.

    Tracing and lowering are Python: threads that did both at once would only stand in the way of
    each other, and of those that compile. So one thread does both for all.

    Args:
        fixed: what all the programs are specialised for, beside their keys and arguments.
    """
    cores = max(2, os.cpu_count() or 2)
    with (
        kept_once(),
        ThreadPoolExecutor(1) as lowering,
        ThreadPoolExecutor(cores) as compiling,
    ):

        def submit(key: Key, job: Job) -> Future[Compiled]:
            make = partial(_make, key, job, lowering)
            return compiling.submit(load_or_compile, (key, fixed, *job[1:]), make)

        try:
            yield submit
        except BaseException:  # such as an interrupt, which is not to wait for what nobody wants
            compiling.shutdown(cancel_futures=True)
            raise


def _make(key: Key, job: Job, lowering: ThreadPoolExecutor) -> Compiled:
    lowered = lowering.submit(_lower, key, job).result()
    started = time.perf_counter()
    program = lowered.compile()
    logger.debug("%s: compiled in %.1f s", key, time.perf_counter() - started)
    return program


def _lower(key: Key, job: Job) -> Lowered:
    function, args, donated = job
    started, worked = time.perf_counter(), time.thread_time()
    lowered = jax.jit(named_apart(function, key[0]), donate_argnums=donated).lower(*args)
    seconds, work = time.perf_counter() - started, time.thread_time() - worked
    logger.debug("%s: lowered in %.1f s, with %.1f s of a core", key, seconds, work)
    return lowered
