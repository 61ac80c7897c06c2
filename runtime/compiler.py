"""Compiling many programs at once, each only where none is kept on disk."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
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

    Tracing and lowering are Python, and for all programs together take as long as the rest does on
    many cores. So one thread alone does both, and those that compile stand back for it.

    Args:
        fixed: what all the programs are specialised for, beside their keys and arguments.
    """
    cores = max(2, os.cpu_count() or 2)
    with (
        kept_once(),
        ThreadPoolExecutor(1) as lowering,
        ThreadPoolExecutor(cores, initializer=_stand_back) as compiling,
    ):

        def submit(key: Key, job: Job) -> Future[Compiled]:
            make = partial(_make, key, job, lowering)
            return compiling.submit(load_or_compile, (key, fixed, *job[1:]), make)

        yield submit


def _stand_back() -> None:
    """Give this thread, and those that XLA starts from it, less of the processor than others."""
    with suppress(OSError):  # only Linux knows threads by such numbers
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _make(key: Key, job: Job, lowering: ThreadPoolExecutor) -> Compiled:
    lowered, seconds = lowering.submit(_lower, key, job).result()
    started = time.perf_counter()
    program = lowered.compile()
    compiling = time.perf_counter() - started
    logger.debug("%s: lowered in %.1f s, compiled in %.1f s", key, seconds, compiling)
    return program


def _lower(key: Key, job: Job) -> tuple[Lowered, float]:
    function, args, donated = job
    started = time.perf_counter()
    lowered = jax.jit(named_apart(function, key[0]), donate_argnums=donated).lower(*args)
    return lowered, time.perf_counter() - started
