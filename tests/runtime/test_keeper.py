"""An engine that is kept alive, and what becomes of its requests."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from threading import Event

import pytest

from paged.runtime import keeper as module
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.engine import Core, Engine
from paged.runtime.engine_thread import EngineThread, Stream
from paged.runtime.errors import ConfigError, EngineDead, EngineRestarting
from paged.runtime.keeper import Keeper, Keeping
from paged.runtime.sampling_params import SamplingParams
from tests.runtime.fakes import FakeCore, front
from tests.runtime.remote import (
    comes_to_rest,
    fake_remote,
    is_gone,
    thread_seconds,
    wait_until,
)

KEEPING = Keeping(step_timeout=60, max_restarts=2)
HASTY = Keeping(step_timeout=0.6, max_restarts=2)
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(module, "_LOOK_EVERY", 0.02)


@contextmanager
def engine(
    monkeypatch: pytest.MonkeyPatch,
    settings: str = "",
    keeping: Keeping = KEEPING,
    before_another: Callable[[], object] = lambda: None,
) -> Iterator[AsyncEngine]:
    """One around a fake core in a process, which is replaced by a sound one."""

    def again(*_: object) -> Engine:
        before_another()
        return Engine(fake_remote(), front())

    path = "paged.runtime.async_engine"
    monkeypatch.setattr(
        f"{path}.load_engine", lambda *_, **how: Engine(fake_remote(settings), front())
    )
    monkeypatch.setattr(f"{path}.load_again", again)
    kept = AsyncEngine(keeping=keeping)
    try:
        yield kept
    finally:
        kept.shutdown()


def thread_of(core: Core) -> EngineThread:
    return EngineThread(Engine(core, front()))


def ask(kept: AsyncEngine, params: SamplingParams = PARAMS) -> str | None:
    async def run() -> str | None:
        async for output in kept.generate("abc", params):
            last = output.outputs[0]
        return last.finish_reason

    return asyncio.run(run())


def pid(kept: AsyncEngine) -> int:
    return int(kept._keeper.thread._engine._core.pid)  # type: ignore[attr-defined]


def test_a_step_that_fails_is_the_end_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch, "dies_at=3") as kept:
        old = pid(kept)
        assert ask(kept) == "error"
        wait_until(lambda: kept.stats().num_restarts == 1)
        assert not kept.errored
        assert ask(kept) == "length"
        assert kept.stats().num_restarts == 1
        assert kept.stats().num_running == 0
        assert is_gone(old)


def test_meanwhile_requests_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Event()
    with engine(monkeypatch, before_another=lambda: seen.wait(30)) as kept:
        os.kill(pid(kept), signal.SIGKILL)
        wait_until(lambda: kept.trouble is not None)
        assert kept.trouble == "has stopped and is being restarted"
        assert not kept.errored
        with pytest.raises(EngineRestarting, match="Killed"):
            ask(kept)
        seen.set()
        wait_until(lambda: kept.trouble is None)
        assert ask(kept) == "length"


def test_a_step_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = "on_step=lambda: time.sleep(core.num_steps > 3 and 60)"
    with engine(monkeypatch, hangs, keeping=HASTY) as kept:
        start = time.monotonic()
        assert ask(kept) == "error"
        assert 0.5 < time.monotonic() - start < 30
        kept._keeper._keeping = KEEPING  # a sound one may take its time
        wait_until(lambda: kept.stats().num_restarts == 1)
        assert ask(kept) == "length"


def test_what_cannot_be_ended_is_told_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine in this process, or one of another API process."""
    gate, told = Event(), list[str]()

    def hang() -> None:
        gate.wait(20)

    core = FakeCore(on_step=hang)
    monkeypatch.setattr(core, "kill", told.append)
    keeper = Keeper(thread_of(core), lambda: thread_of(FakeCore()), Keeping(0.02, 1))

    async def run() -> None:
        keeper.thread.start(Stream(front().prepare("a", "abc", PARAMS)))

    asyncio.run(run())
    wait_until(lambda: told)
    time.sleep(0.3)
    assert len(told) == 1
    gate.set()
    keeper.shutdown()


def test_the_first_steps_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALLOWANCE", 100)
    slow = "on_step=lambda: time.sleep(core.num_steps == 1 and 1.2)"
    with engine(monkeypatch, slow, keeping=HASTY) as kept:
        assert ask(kept, SamplingParams(max_tokens=1)) == "length"  # in two steps
        assert kept.stats().num_restarts == 0


def test_an_engine_without_work_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch) as kept:
        for _ in range(2):
            assert ask(kept) == "length"
            comes_to_rest(lambda: thread_seconds(kept._keeper.thread._thread))
            kept._keeper.thread._last_news -= 10_000  # as if all that time had passed
            time.sleep(0.1)
            assert kept.trouble is None
        assert kept.stats().num_restarts == 0


def test_restarts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch) as kept:
        for number in (1, 2):
            os.kill(pid(kept), signal.SIGKILL)
            wait_until(lambda number=number: kept.stats().num_restarts == number)  # type: ignore[misc]
        os.kill(pid(kept), signal.SIGKILL)
        wait_until(lambda: kept.errored)
        assert kept.trouble == "has stopped; see the server's log"
        with pytest.raises(EngineDead):
            ask(kept)


def test_those_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_WINDOW", 0.05)
    with engine(monkeypatch) as kept:
        for number in range(1, 5):
            os.kill(pid(kept), signal.SIGKILL)
            wait_until(lambda number=number: kept.stats().num_restarts == number)  # type: ignore[misc]
            time.sleep(0.1)
        assert ask(kept) == "length"


def test_starts_that_fail_count_and_come_later_each_time() -> None:
    times = []

    def again() -> EngineThread:
        times.append(time.monotonic())
        raise ConfigError("no room")

    keeper = Keeper(thread_of(fake_remote()), again, Keeping(60, 4))
    keeper.thread.kill("it had to")
    wait_until(lambda: keeper.thread.dead_error is not None and not keeper.is_restarting)
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) == 4
    assert all(gap >= least for gap, least in zip(gaps, (0.02, 0.04, 0.08), strict=True))
    assert keeper.num_restarts == 0
    with pytest.raises(EngineDead, match="it had to"):
        keeper.living()
    keeper.shutdown()


def test_another_is_started_when_the_one_before_is_gone() -> None:
    gone = []
    hangs = "import atexit; os._exit = print; atexit.register(time.sleep, 1)"
    slow = fake_remote("dies_at=1", hangs)

    def again() -> EngineThread:
        gone.append(is_gone(slow.pid))
        return thread_of(FakeCore())

    keeper = Keeper(thread_of(slow), again, Keeping(60, 1))
    keeper.thread.call(lambda engine: engine.add(front().prepare("a", "abc", PARAMS))).result()
    wait_until(lambda: keeper.num_restarts == 1)
    keeper.shutdown()
    assert gone == [True]


def test_a_shutdown_while_another_is_started() -> None:
    begun, may_end, core = Event(), Event(), FakeCore()

    def again() -> EngineThread:
        begun.set()
        assert may_end.wait(30)
        return thread_of(core)

    keeper = Keeper(thread_of(fake_remote()), again, Keeping(60, 1))
    keeper.thread.kill("it had to")
    assert begun.wait(30)
    keeper.shutdown()
    may_end.set()
    wait_until(lambda: core.closed)
