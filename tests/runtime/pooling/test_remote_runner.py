"""A device for vectors in another process: the same answers, and a death that is noticed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import numpy as np
import pytest

from paged.errors import ConfigError
from paged.runtime import keeper
from paged.runtime.errors import EngineDead
from paged.runtime.keeper import Keeping
from paged.runtime.pooling.engine import PoolingEngine
from paged.runtime.pooling.remote import RemoteRunner
from tests.runtime.pooling.pooling_fakes import FakeRunner, pooling_engine
from tests.runtime.pooling.remote_fakes import remote_engine, remote_runner
from tests.runtime.remote import is_gone, wait_until

SECONDS = 20
TEXTS = [letters * size for size in (1, 7, 3, 20, 2) for letters in ("a", "z")]


@contextmanager
def running(settings: str = "") -> Iterator[tuple[PoolingEngine, RemoteRunner]]:
    runner = remote_runner(settings)
    engine = remote_engine(runner)
    yield engine, runner
    engine.shutdown()
    assert is_gone(runner.pid)


def vectors(engine: PoolingEngine) -> np.ndarray:
    outputs = engine.embed(engine.reader.texts(TEXTS)).result(SECONDS)
    return np.stack([output.outputs.embedding for output in outputs])


def test_vectors_are_the_same() -> None:
    here = pooling_engine()
    with running("num_compiles=3") as (engine, _):
        np.testing.assert_array_equal(vectors(engine), vectors(here))
        assert engine.stats().compiles_after_warmup == 3
        assert engine.stats().num_steps == here.stats().num_steps
        engine.shutdown()
        assert engine.dead_error is None
        with pytest.raises(EngineDead, match="was shut down"):
            engine.embed(engine.reader.texts(["a"]))
    here.shutdown()


def test_a_death_is_noticed_while_nothing_is_computed() -> None:
    with running() as (engine, runner):
        os.kill(runner.pid, signal.SIGKILL)
        wait_until(lambda: engine.errored)
        assert str(engine.dead_error) == "the engine process was ended by signal 9 (Killed)"
        with pytest.raises(EngineDead, match="signal 9"):
            engine.embed(engine.reader.texts(["a"]))


def test_a_death_ends_what_is_computed() -> None:
    with running("pause=60") as (engine, runner):
        future = engine.embed(engine.reader.texts(["a"]))
        wait_until(lambda: engine.stats().num_running)
        os.kill(runner.pid, signal.SIGKILL)
        assert isinstance(future.exception(SECONDS), EngineDead)
        assert engine.errored


def test_one_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_FIRST_STEPS", 0)
    monkeypatch.setattr(keeper, "_FIRST_DELAY", 0.01)
    runner = remote_runner("pause=60")
    seen = Event()

    def again() -> FakeRunner:
        assert seen.wait(30)
        return FakeRunner()

    engine = remote_engine(runner, Keeping(step_timeout=1, max_restarts=1), again)
    future = engine.embed(engine.reader.texts(["a"]))
    wait_until(lambda: engine.trouble is not None)
    seen.set()
    assert "no step has finished" in str(future.exception(SECONDS))
    wait_until(lambda: engine.stats().num_restarts == 1)
    assert engine._keeper.thread.dead_error is None
    assert len(vectors(engine)) == len(TEXTS)
    assert is_gone(runner.pid)
    engine.shutdown()


def test_what_the_device_fails_with_is_said() -> None:
    with running("fails_at=0") as (engine, _):
        future = engine.embed(engine.reader.texts(["a"]))
        assert "RuntimeError: the device fell off" in str(future.exception(SECONDS))
        wait_until(lambda: engine.errored)


def test_what_it_cannot_start_with_is_raised() -> None:
    refuse = "from paged.errors import ConfigError; raise ConfigError('no room')"
    with pytest.raises(ConfigError, match="no room"):
        remote_runner(statement=refuse)
    with pytest.raises(EngineDead, match="exit status 3"):
        remote_runner(statement="os._exit(3)")
