"""Engine processes around the core without a device, and what their tests need to know of them."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import psutil

from paged.runtime.config import EngineConfig
from paged.runtime.engine import Engine
from paged.runtime.memory import MemoryPlan
from paged.runtime.messages import EngineRequest, Saving
from paged.runtime.remote_core import RemoteCore
from paged.runtime.sampling_params import SamplingParams
from tests.runtime.fakes import MAX_MODEL_LEN, VOCAB_SIZE, FakeCore, front

MEMORY = MemoryPlan(None, 1, 2, 3, 4, 5, 6, MAX_MODEL_LEN, 40)
_PROGRAM = """
import os, sys, time
from paged.runtime.engine_process import main
from tests.runtime.remote import ServedFake

def make_core(config):
    core = ServedFake({settings})
    {statement}
    return core

sys.exit(main(int(sys.argv[-1]), make_core))
"""


class ServedFake(FakeCore):
    """The fake core as an engine process takes it."""

    max_model_len = MAX_MODEL_LEN
    vocab_size = VOCAB_SIZE
    memory = MEMORY
    startup: ClassVar[dict[str, float]] = {"weights": 1.5}

    def closing(self) -> Iterator[Saving]:
        self.close()
        return iter(())


def fake_program(settings: str = "", statement: str = "") -> tuple[str, str]:
    """The process of a fake core with these settings, after a statement (`core` is known)."""
    return "-c", _PROGRAM.format(settings=settings, statement=statement)


def fake_remote(settings: str = "", statement: str = "") -> RemoteCore:
    return RemoteCore(EngineConfig(), program=fake_program(settings, statement))


def remote_engine(settings: str = "", statement: str = "", **changes: Any) -> Engine:
    return Engine(fake_remote(settings, statement), front(**changes))


def make_request(name: str, prompt: list[int] | None = None, **params: Any) -> EngineRequest:
    params = {"max_tokens": 12, "ignore_eos": True, **params}
    return EngineRequest(name, prompt or [1, 2, 3], SamplingParams(**params))


@contextmanager
def spawned(argv: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed when its block is left, failed or not: `Popen` waits for it."""
    with subprocess.Popen(argv, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


def command_line(pid: int) -> list[str]:
    """How a process was started; nothing of one that has ended, be it waited for or not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).cmdline()
    return []


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> float:
    """Seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen"
        time.sleep(0.005)
    return time.monotonic() - start


def comes_to_rest(seconds_used: Callable[[], float]) -> None:
    """Wait until some part of a second takes (almost) no more of a processor's time.

    Args:
        seconds_used: seconds of a processor so far.
    """

    def rests() -> bool:
        before = seconds_used()
        time.sleep(0.4)
        return seconds_used() - before <= 0.01

    wait_until(rests)


def thread_seconds(thread: threading.Thread) -> float:
    """Seconds of a processor that a living thread has taken, whatever others of its process do."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
