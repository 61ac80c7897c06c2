"""Compiling many programs at once, each only where none is kept on disk."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from functools import partial
from typing import Any

from jax.stages import Compiled

from paged.models.loading.progress import progress
from paged.runtime.lowering import Job, Key, Lowering
from paged.runtime.program_store import kept_once, load_or_compile

logger = logging.getLogger(__name__)


def compile_all(
    fixed: Any,
    jobs: Iterable[tuple[Key, Job]],
    *,
    processes: int = 0,
    show_progress: bool = False,
) -> dict[Key, Compiled]:
    """A program for each job, many compiled at a time; the first jobs begin first.

    After an error it waits only for what is being compiled, and the rest is cancelled.

    Args:
        fixed: what all the programs are specialised for, beside their keys and arguments.
        processes: that trace and lower; see `Lowering`.
    """
    cores = max(2, os.cpu_count() or 2)
    programs: dict[Key, Compiled] = {}
    made: list[Key] = []
    started = time.perf_counter()
    with (
        kept_once(),
        closing(Lowering(processes)) as lowering,
        ThreadPoolExecutor(cores) as compiling,
    ):
        try:
            futures = {}
            for key, job in jobs:
                what = (key, fixed, job.args, job.donated)
                make = partial(_make, key, job, lowering, made)
                futures[compiling.submit(load_or_compile, what, make)] = key
            with progress(len(futures), "Preparing", " programs", show=show_progress) as advance:
                for done in as_completed(futures):
                    programs[futures[done]] = done.result()
                    advance(1)
        except BaseException:  # such as an interrupt, which is not to wait for what nobody wants
            compiling.shutdown(wait=False, cancel_futures=True)
            lowering.close()
            raise
    logger.info(
        "%d programs compiled, %d from the cache, in %.1f s",
        len(made),
        len(programs) - len(made),
        time.perf_counter() - started,
    )
    return programs


def memory_to_run(programs: Iterable[Compiled]) -> int:
    """Bytes of device memory that programs need beside what they are given.

    As XLA reports it: temporaries of one program, and the outputs of the two runs that can be in
    flight. What a program takes over is no output.
    """
    temporary = outputs = 0
    for program in programs:
        report = program.memory_analysis()
        assert report is not None, "this backend does not report the memory of its programs"
        temporary = max(temporary, report.temp_size_in_bytes)
        outputs = max(outputs, report.output_size_in_bytes - report.alias_size_in_bytes)
    return temporary + 2 * outputs


def _make(key: Key, job: Job, lowering: Lowering, made: list[Key]) -> Compiled:
    """Compile a program that is not kept, and note in `made` that it was."""
    lowered = lowering(key, job)
    started = time.perf_counter()
    program = lowered.compile()
    logger.debug("%s: compiled in %.1f s", key, time.perf_counter() - started)
    made.append(key)
    return program
