"""The end of an `AsyncEngine`: it dies, is shut down, is forgotten, or its interpreter exits."""

import asyncio
import gc
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.errors import EngineDead
from paged.runtime.outputs import RequestOutput
from tests.runtime.remote import wait_until
from tests.runtime.test_async_engine import (
    ENDLESS,
    LONG,
    collect,
    core,
    leave_by_break,
    make,
    together,
    until,
)

__all__ = ["core"]  # a fixture

ROOT = Path(__file__).parents[2]


def test_death_reaches_everyone(core, monkeypatch):
    core.dies_at = 10
    engine = make(core, monkeypatch)

    async def run() -> list[Any]:
        return await together(core, *(collect(engine, "ab", LONG) for _ in range(5)))

    for outputs in asyncio.run(run()):
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "error"
        assert outputs[-1].outputs[0].error == "the device fell off"
    check_dies(engine, "the device fell off")
    assert isinstance(engine.dead_error, EngineDead)
    engine.shutdown()


def test_a_death_that_ends_no_request_is_noticed(core, monkeypatch):
    def die_for_nobody() -> None:
        if not core.live:  # what is in flight is nobody's any more
            core.dies_at = core.num_steps

    core.on_step = die_for_nobody
    engine = make(core, monkeypatch, max_model_len=2 * 10**6)
    asyncio.run(leave_by_break(engine))
    check_dies(engine, "the device fell off")
    engine.shutdown()


def test_an_unexpected_failure_kills_too(core, monkeypatch, caplog):
    def fail() -> None:
        if core.num_steps == 5:
            raise ZeroDivisionError("oh")

    core.on_step = fail
    engine = make(core, monkeypatch)

    async def run() -> list[Any]:
        requests = [collect(engine, "ab", LONG) for _ in range(5)]
        return await asyncio.gather(*requests, return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, EngineDead)
        assert str(error) == "the engine stopped: ZeroDivisionError: oh"
    check_dead(engine, "ZeroDivisionError")
    assert engine.errored
    assert "The engine's thread failed" in caplog.text
    engine.shutdown()
    assert core.closed


def check_dies(engine: AsyncEngine, reason: str) -> None:
    """It says why as soon as it knows, and takes calls until a moment later."""
    wait_until(lambda: not engine.is_running)
    assert engine.errored
    check_dead(engine, reason)


def check_dead(engine: AsyncEngine, reason: str) -> None:
    assert not engine.is_running
    with pytest.raises(EngineDead, match=reason):
        asyncio.run(collect(engine, "ab"))
    with pytest.raises(EngineDead, match=reason):
        asyncio.run(engine.reset_prefix_cache())
    asyncio.run(engine.abort("r"))
    assert engine.stats() is not None


def test_shutdown_ends_running_requests(core, monkeypatch):
    engine = make(core, monkeypatch, max_model_len=2 * 10**6)

    async def run() -> list[list[RequestOutput]]:
        tasks = [asyncio.create_task(collect(engine, "ab", ENDLESS)) for _ in range(3)]
        await until(lambda: len(core.live) == 3)
        engine.shutdown()
        engine.shutdown()
        return await asyncio.gather(*tasks)

    for outputs in asyncio.run(run()):
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
    check_dead(engine, "shut down")
    assert (engine.errored, engine.dead_error) == (False, None)
    assert core.closed


def test_a_forgotten_engine_shuts_down(core, monkeypatch):
    engine = make(core, monkeypatch)
    thread = engine._keeper.thread._thread
    del engine
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert core.closed


def test_the_interpreters_exit_shuts_down():
    script = """
        import asyncio
        from paged.runtime import async_engine as module
        from tests.runtime.fakes import FakeCore, engine

        class Core(FakeCore):
            def close(self):
                print("closed")

        module.load_engine = lambda _, **how: engine(Core(step_time=0.001), max_model_len=10**6)
        params = module.SamplingParams(max_tokens=10**5)
        engine = module.AsyncEngine()
        loop = asyncio.new_event_loop()
        stream = engine.generate("ab", params)
        print(loop.run_until_complete(anext(stream)).finished)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.returncode) == ("False\nclosed\n", 0), run.stderr
