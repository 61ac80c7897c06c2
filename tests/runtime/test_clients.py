"""An engine process with several API processes: to each its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from paged.runtime.child_process import JoinedProcess
from paged.runtime.config import EngineConfig
from paged.runtime.errors import EngineDead
from paged.runtime.messages import SequenceOutput
from paged.runtime.remote_core import RemoteCore
from tests.runtime.remote import MEMORY, fake_program, make_request, wait_until


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[tuple[RemoteCore, RemoteCore]]:
    """The one that started the process, and one that has joined."""
    path = str(tmp_path / "door")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        program = fake_program("step_time=0.01")
        first = RemoteCore(EngineConfig(), program=program, door=door)
    joined = RemoteCore(EngineConfig(), process=JoinedProcess(path))
    yield first, joined
    joined.close()
    first.close()


def to_the_end(core: RemoteCore, count: int) -> list[SequenceOutput]:
    """All news until so many sequences have ended."""
    news: list[SequenceOutput] = []
    while sum(item.finish_reason is not None for item in news) < count:
        news += core.step()
    return news


def test_each_gets_its_own_news(cores: tuple[RemoteCore, RemoteCore]) -> None:
    first, joined = cores
    assert joined.memory == MEMORY
    first.add(make_request("a"))
    joined.add(make_request("b", n=2))
    first.add(make_request("c"))
    assert {item.request_id for item in to_the_end(joined, 2)} == {"b"}
    assert {item.request_id for item in to_the_end(first, 2)} == {"a", "c"}


def test_an_abort_is_heard_by_the_engine(cores: tuple[RemoteCore, RemoteCore]) -> None:
    first, joined = cores
    joined.add(make_request("a", max_tokens=10**6))
    joined.add(make_request("b", n=2, max_tokens=10**6))
    wait_until(lambda: _num_running(first) == 3)
    for name, index in (("a", None), ("b", 0), ("b", 1)):
        assert joined.abort(name, index)
    wait_until(lambda: _num_running(first) == 0)


def test_whoever_leaves_takes_its_requests_along(cores: tuple[RemoteCore, RemoteCore]) -> None:
    first, joined = cores
    joined.add(make_request("a", max_tokens=10**6))
    wait_until(lambda: _num_running(first) == 1)
    joined.close()
    wait_until(lambda: _num_running(first) == 0)
    first.add(make_request("a"))
    assert to_the_end(first, 1)[-1].finish_reason == "length"


def test_all_hear_of_the_end(cores: tuple[RemoteCore, RemoteCore]) -> None:
    first, joined = cores
    joined.add(make_request("a", max_tokens=10**6))
    first.close()
    assert to_the_end(joined, 1)[-1].finish_reason == "error"
    with pytest.raises(EngineDead):
        joined.add(make_request("b"))


def _num_running(core: RemoteCore) -> int:
    """As far as it has heard."""
    if core.has_work:
        core.step()
    return core.stats().num_running
