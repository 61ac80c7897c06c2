"""Compiling many programs at once, each only where none is kept on disk."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import jax
from jax.stages import Compiled

from paged.models.loading.progress import progress
from paged.runtime.lowering import Job, Key, Lowering
from paged.runtime.program_store import kept_once, load_or_compile

logger = logging.getLogger(__name__)


class Compiler:
    """Compiles programs, many at a time, each only where none is kept on disk.

    Those begin first that are given first. Leaving its context waits only for what is being
    compiled, and cancels the rest. From the first program on that was not on disk to the end of the
    context JAX's own cache takes nothing; see `kept_once`.

    Args:
        processes: that trace and lower; see `Lowering`.
        devices: that programs run on; without any, the default device.
    """

    def __init__(self, processes: int = 0, devices: Sequence[jax.Device] = ()) -> None:
        self._lowering = Lowering(processes)
        self._devices = devices
        self._threads = ThreadPoolExecutor(max(2, os.cpu_count() or 2))
        self._begun: dict[str, Future[_Program]] = {}
        self._context = ExitStack()
        self._keeping = ExitStack()
        self._first = threading.Lock()

    def __enter__(self) -> Self:
        self._context.enter_context(self._keeping)
        self._context.callback(self._threads.shutdown)
        self._context.callback(self._lowering.close)
        self._context.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def begin(self, fixed: Any, jobs: Iterable[tuple[Key, Job]]) -> dict[Key, Future[_Program]]:
        """Compile programs while the caller does something else; the same one only once.

        Args:
            fixed: what all the programs are specialised for, beside their keys and arguments.
        """
        return {key: self._begin(key, job, fixed) for key, job in jobs}

    def programs(
        self, fixed: Any, jobs: Iterable[tuple[Key, Job]], *, show_progress: bool = False
    ) -> dict[Key, Compiled]:
        """Wait for a program for each job. Raises what compiling one of them raises."""
        started = time.perf_counter()
        futures = self.begin(fixed, jobs)
        with progress(len(futures), "Preparing", " programs", show=show_progress) as advance:
            for done in as_completed(futures.values()):
                done.result()
                advance(1)
        programs = {key: future.result() for key, future in futures.items()}
        made = sum(program.made for program in programs.values())
        logger.info(
            "%d programs compiled, %d from the cache, in %.1f s",
            made,
            len(programs) - made,
            time.perf_counter() - started,
        )
        return {key: program.compiled for key, program in programs.items()}

    def _begin(self, key: Key, job: Job, fixed: Any) -> Future[_Program]:
        what = (key, fixed, job.args, job.donated)
        name = repr(what)
        if name not in self._begun:
            self._begun[name] = self._threads.submit(self._program, what, key, job)
        return self._begun[name]

    def _program(self, what: Any, key: Key, job: Job) -> _Program:
        made: list[Compiled] = []

        def make() -> Compiled:
            if self._first.acquire(blocking=False):
                self._keeping.enter_context(kept_once())
            made.append(self._make(key, job))
            return made[0]

        return _Program(load_or_compile(what, make, self._devices), bool(made))

    def _make(self, key: Key, job: Job) -> Compiled:
        lowered = self._lowering(key, job)
        started = time.perf_counter()
        program = lowered.compile()
        logger.debug("%s: compiled in %.1f s", key, time.perf_counter() - started)
        return program


class _Program(NamedTuple):
    """A compiled program, and whether it was not on disk."""

    compiled: Compiled
    made: bool


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
