"""How long an engine takes to end that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from paged.runtime import ending, remote_core
from paged.runtime.engine import Engine
from paged.runtime.engine_thread import EngineThread, Stream
from paged.runtime.sampling_params import SamplingParams
from tests.runtime.fakes import FakeCore, front
from tests.runtime.pooling.pooling_fakes import FakeRunner, pooling_engine
from tests.runtime.pooling.remote_fakes import remote_engine as remote_pooling
from tests.runtime.pooling.remote_fakes import remote_runner
from tests.runtime.remote import fake_remote, is_gone, wait_until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "LAST_STEP", 0.3)
    monkeypatch.setattr(remote_core, "TIME_TO_CLOSE", 0.3)


def ask(thread: EngineThread, prompt: list[int]) -> None:
    async def run() -> None:
        thread.start(Stream(thread.front.prepare("a", {"prompt_token_ids": prompt}, PARAMS)))

    asyncio.run(run())


PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


def test_a_step_in_this_process_is_left_alone() -> None:
    gate, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        gate.wait(20)

    core = FakeCore(on_step=hang)
    thread = EngineThread(Engine(core, front()))
    ask(thread, [1, 2])
    assert entered.wait(10)
    started = time.monotonic()
    thread.shutdown()
    assert time.monotonic() - started < 10
    gate.set()
    wait_until(lambda: core.closed)


def test_a_process_that_reads_nothing_is_ended() -> None:
    core = fake_remote()
    thread = EngineThread(Engine(core, front(max_model_len=2**21)))
    os.kill(core.pid, signal.SIGSTOP)
    ask(thread, [1] * 2**20)  # more than a socket holds
    started = time.monotonic()
    thread.shutdown()
    assert time.monotonic() - started < 10
    assert is_gone(core.pid)
    assert thread.dead_error is None


def test_a_batch_in_a_process_is_ended() -> None:
    runner = remote_runner("pause=60")
    engine = remote_pooling(runner)
    future = engine.embed(engine.reader.texts(["ab"]))
    wait_until(lambda: engine.stats().num_running)
    engine.shutdown()
    assert is_gone(runner.pid)
    assert future.exception(30) is not None
    assert engine.dead_error is None


def test_a_batch_in_this_process_is_left_alone() -> None:
    runner = FakeRunner()
    runner.gate.clear()
    engine = pooling_engine(runner)
    engine.embed(engine.reader.texts(["ab"]))
    assert runner.entered.wait(10)
    started = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - started < 10
    runner.gate.set()
    wait_until(lambda: runner.closed)
