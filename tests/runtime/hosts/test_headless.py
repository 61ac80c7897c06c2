"""What keeps the process of a rank above 0 running."""

from __future__ import annotations

import pytest

from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.hosts import headless
from paged.runtime.hosts.headless import serve_headless

CONFIG = EngineConfig(nnodes=2, node_rank=1, tensor_parallel_size=2)
# Reads what it is to load, and then says what its argument is.
PROGRAM = """
import socket, sys
from paged.runtime.errors import *
from paged.runtime.wire import *
channel = Channel(socket.socket(fileno=int(sys.argv[1])), Start)
[start] = channel.receive(wait=True)
assert start.config.node_rank == 1
channel.send({})
channel.flush()
"""


class Enough(Exception):
    """The test has seen what it wanted."""


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that it waits between two tries; the second wait ends it."""
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise Enough

    monkeypatch.setattr(headless, "sleep", sleep)
    return waited


def test_it_joins_again_whenever_it_has_ended(delays: list[float]) -> None:
    ready: list[bool] = []
    with pytest.raises(Enough):
        serve_headless(CONFIG, lambda: ready.append(True), ("-c", PROGRAM.format("Joined()")))
    assert len(ready) == 2
    assert delays == [0.5, 0.5]


def test_it_waits_longer_each_time_that_it_could_not_load(delays: list[float]) -> None:
    program = ("-c", PROGRAM.format("Failed.of(EngineDead('rank 0 is gone'))"))
    with pytest.raises(Enough):
        serve_headless(CONFIG, lambda: None, program)
    assert delays == [1.0, 2.0]


def test_what_no_other_try_would_mend_is_raised() -> None:
    program = ("-c", PROGRAM.format("Failed.of(ConfigError('--seed differs'))"))
    with pytest.raises(ConfigError, match="--seed differs"):
        serve_headless(CONFIG, lambda: None, program)
