"""How another rank finds rank 0, and what it does as it is told."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError, EngineDead
from paged.runtime.greeting import NotAdmitted
from paged.runtime.hosts import cluster, follower
from paged.runtime.hosts.follower import _join, follow
from paged.runtime.hosts.handshake import admit
from paged.runtime.hosts.messages import Call, End, Packed, ToLeader
from paged.runtime.line import Line
from tests.runtime.hosts.lines import line_pair
from tests.runtime.remote import wait_until

FACTS = {"the model": "a"}
TIMEOUT = 20


def config_at(port: int) -> EngineConfig:
    return EngineConfig(nnodes=2, node_rank=1, tensor_parallel_size=2, master_port=port)


def test_rank_0_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first there is nobody, then somebody who hangs up."""
    tries: list[float] = []
    monkeypatch.setattr(follower, "time", SimpleNamespace(sleep=tries.append))
    with socket.socket() as server, ThreadPoolExecutor(1) as threads:
        server.bind(("127.0.0.1", 0))  # nobody else has the port, and nobody listens there
        joining = threads.submit(_join, config_at(server.getsockname()[1]), FACTS)
        wait_until(lambda: len(tries) > 1)
        server.listen()
        server.settimeout(TIMEOUT)
        server.accept()[0].close()
        line = Line(server.accept()[0], ToLeader)
        assert admit(line, FACTS) == 1
        joining.result(TIMEOUT).close()
        line.close()


def test_a_refusal_is_no_reason_to_try_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(_join, config_at(server.getsockname()[1]), {"the model": "b"})
        line = Line(server.accept()[0], ToLeader)
        with pytest.raises(NotAdmitted):
            admit(line, FACTS)
        line.close()
        assert isinstance(joining.exception(TIMEOUT), ConfigError)


class Recorder:
    """A device that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.shapes = SimpleNamespace()

    def call(self, key: Any, *inputs: Any) -> None:
        self.calls.append((key, *(each.tolist() for each in inputs)))

    def close(self) -> None:
        self.calls.append(("close",))


def test_what_is_told_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged.runtime.programs.call_keys", lambda _: (("a",), ("b", 1)))
    monkeypatch.setattr(cluster, "end", lambda: None)
    device: Any = Recorder()
    with line_pair() as (leader, other):
        leader.send(Call(1, [Packed.of(np.arange(2, dtype=np.int32))]))
        leader.send(Call(0, []))
        leader.send(End())
        follow(device, other)
        assert device.calls == [(("b", 1), [0, 1]), (("a",),), ("close",)]


def test_without_rank_0_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged.runtime.programs.call_keys", lambda _: ())
    device: Any = Recorder()
    with line_pair() as (leader, other):
        leader.close()
        with pytest.raises(EngineDead, match="rank 0 is gone"):
            follow(device, other)
