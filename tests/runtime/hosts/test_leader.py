"""How rank 0 gathers the others, and what it makes of one that is lost."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue

import numpy as np
import pytest

from paged.runtime.child_process import PEER_LOST
from paged.runtime.config import EngineConfig
from paged.runtime.errors import EngineDead
from paged.runtime.hosts import leader
from paged.runtime.hosts.handshake import introduce
from paged.runtime.hosts.leader import Followers, _Follower, _joined
from paged.runtime.hosts.messages import (
    Begin,
    Call,
    End,
    Failing,
    Following,
    Packed,
    ToFollower,
)
from paged.runtime.line import Line
from tests.runtime.hosts.lines import line_pair

FACTS = {"the model": "a"}
THREE = EngineConfig(nnodes=3, tensor_parallel_size=3)
TIMEOUT = 20


def joining(server: socket.socket, rank: int) -> Line:
    line = Line(socket.create_connection(server.getsockname(), TIMEOUT), ToFollower)
    introduce(line, rank, FACTS)
    return line


def test_all_other_ranks_are_waited_for() -> None:
    """One that left before all were there, one of the same rank, and one that is of no rank."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        gathering = threads.submit(_joined, server, THREE, FACTS)
        joining(server, 1).close()
        joining(server, 7).close()
        lines = [joining(server, 2), joining(server, 1)]
        joined = gathering.result(TIMEOUT)
        assert sorted(joined) == [1, 2]
        assert joined[1].name == "rank 1 of 3 (127.0.0.1)"
        for rank, line in zip((2, 1), lines, strict=True):
            joined[rank].line.send(End())
            assert isinstance(line.receive(within=TIMEOUT), End)
            line.close()
            joined[rank].line.close()


def test_those_who_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "TIME_TO_JOIN", -1.0)
    expected = pytest.raises(EngineDead, match="rank 1, 2 of 3 did not join")
    with socket.create_server(("127.0.0.1", 0)) as server, expected:
        _joined(server, THREE, FACTS)


@contextmanager
def one_follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Followers, Line, Queue[int]]]:
    """Rank 0's side, rank 1's line, and the statuses that the process would have ended with."""
    ended: Queue[int] = Queue()
    monkeypatch.setattr(os, "_exit", ended.put)
    monkeypatch.setattr(leader, "_LAST_WORDS", 0.0)
    with line_pair() as (ours, theirs):
        followers = Followers({1: _Follower("rank 1 of 2 (there)", ours)})
        followers.watch()
        yield followers, theirs, ended
        followers.close()


def test_calls_are_told_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_follower(monkeypatch) as (followers, theirs, ended):
        followers.begin("host:1")
        theirs.send(Following())
        followers.await_ready()
        followers.call(2, (np.int32(3),))
        followers.close()
        told = [theirs.receive(within=TIMEOUT) for _ in range(3)]
        assert told == [Begin("host:1"), Call(2, [Packed.of(np.int32(3))]), End()]
    assert ended.empty()


def test_a_rank_that_cannot_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_follower(monkeypatch) as (followers, theirs, ended):
        theirs.send(Failing("no room"))
        with pytest.raises(EngineDead, match=r"rank 1 of 2 \(there\) cannot go on: no room"):
            followers.await_ready()
        assert ended.get(timeout=TIMEOUT) == PEER_LOST


def test_this_process_ends_when_another_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_follower(monkeypatch) as (followers, theirs, ended):
        assert followers.loss(0) is None
        theirs.close()
        assert followers.loss(TIMEOUT) == "rank 1 of 2 (there) is gone"
        assert ended.get(timeout=TIMEOUT) == PEER_LOST
