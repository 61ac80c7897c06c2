"""Processes around a runner for vectors without a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged.runtime.config import EngineConfig
from paged.runtime.keeper import Keeping
from paged.runtime.pooling.abilities import Abilities
from paged.runtime.pooling.engine import PoolingEngine
from paged.runtime.pooling.grid import Grid, Shape
from paged.runtime.pooling.remote import RemoteRunner
from paged.runtime.pooling.setup import Ready
from paged.runtime.pooling.vectors import Vectors
from paged.runtime.pooling.worker import Runner
from tests.runtime.pooling.pooling_fakes import MAX_MODEL_LEN, SIZE, reader

_PROGRAM = """
import os, sys, time
from paged.runtime.engine_process import serve_model
from paged.runtime.pooling.process import serve
from paged.runtime.wire import ToPooling
from tests.runtime.pooling.remote_fakes import PackedRunner, ready_with

def load(start):
    {statement}
    return ready_with(PackedRunner({settings}))

sys.exit(serve_model(int(sys.argv[-1]), load, serve, ToPooling))
"""


@dataclass(frozen=True)
class Launched:
    packed: NDArray[np.int32]
    pause: float
    fails: bool

    def read(self) -> Vectors:
        if self.fails:
            raise RuntimeError("the device fell off")
        time.sleep(self.pause)
        length = self.packed.shape[1] // 2
        ids, types = self.packed[:, :length], self.packed[:, length:-1]
        columns = (ids.sum(1), self.packed[:, -1], types.sum(1), np.ones(len(ids)))
        return np.stack(columns, 1).astype(np.float32)


@dataclass
class PackedRunner:
    """Gives what `FakeRunner` does; `fails_at` counts batches, `pause` is seconds for each."""

    fails_at: int | None = None
    pause: float = 0.0
    num_compiles: int = 0
    num_launched: int = 0

    def launch_packed(self, shape: Shape, packed: NDArray[np.int32]) -> Launched:
        assert packed.shape == (shape.rows, 2 * shape.length + 1)
        self.num_launched += 1
        return Launched(packed, self.pause, self.num_launched - 1 == self.fails_at)

    def close(self) -> None:
        pass


def ready_with(runner):
    abilities = Abilities(scores=False, size=SIZE, dimensions=(), normalized=True)
    return Ready(runner, Grid.make(MAX_MODEL_LEN, 4, 64), abilities, MAX_MODEL_LEN, False)


def remote_runner(settings: str = "", statement: str = "") -> RemoteRunner:
    """A process whose runner has these settings, after a statement."""
    program = ("-c", _PROGRAM.format(settings=settings, statement=statement or "pass"))
    return RemoteRunner(EngineConfig(), program=program)


def remote_engine(
    runner: RemoteRunner,
    keeping: Keeping | None = None,
    again: Callable[[], Runner] | None = None,
) -> PoolingEngine:
    """An engine over a process, and after its death over others that are sound."""
    ready = runner.ready
    return PoolingEngine(
        reader(), ready.abilities, runner, ready.grid, again=again or remote_runner, keeping=keeping
    )
