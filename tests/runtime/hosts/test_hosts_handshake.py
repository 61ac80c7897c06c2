"""Who is admitted to an engine of several processes, and what its messages carry."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from paged.runtime.errors import ConfigError
from paged.runtime.greeting import Hello, NotAdmitted, Welcome
from paged.runtime.hosts import handshake
from paged.runtime.hosts.handshake import KEY_VARIABLE, admit, introduce
from paged.runtime.hosts.messages import Call, End, Join, Packed
from paged.runtime.line import Line
from tests.runtime.hosts.lines import line_pair

FACTS = {"the model": "a", "--seed": "0"}
TIMEOUT = 20


def both(theirs: dict[str, str], rank: int = 1) -> tuple[Any, Any]:
    """What the two sides of a handshake come to: results, or what they raised."""
    with line_pair() as (leader, other), ThreadPoolExecutor(1) as threads:
        joining = threads.submit(introduce, other, rank, theirs)
        try:
            admitted: Any = admit(leader, FACTS)
        except NotAdmitted as error:
            admitted = str(error)
        return admitted, joining.exception(TIMEOUT)


def test_whoever_knows_the_key_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(FACTS) == (1, None)
    monkeypatch.setenv(KEY_VARIABLE, "some key")
    assert both(FACTS, rank=3) == (3, None)


def test_whoever_has_another_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = iter(["theirs", "ours"])
    monkeypatch.setattr(handshake, "_proof", lambda side, *_: f"{side} {next(keys)}".encode())
    admitted, raised = both(FACTS)
    assert KEY_VARIABLE in admitted
    assert isinstance(raised, ConfigError)
    assert KEY_VARIABLE in str(raised)


def test_a_leader_that_does_not_know_the_key_is_found_out() -> None:
    with line_pair() as (leader, other), ThreadPoolExecutor(1) as threads:
        joining = threads.submit(introduce, other, 1, FACTS)
        leader.send(Hello(b"n"))
        assert isinstance(leader.receive(within=TIMEOUT), Join)
        leader.send(Welcome(b"no proof"))
        assert "answers for rank 0" in str(joining.exception(TIMEOUT))


@pytest.mark.parametrize(
    ("theirs", "word"),
    [
        (FACTS | {"--seed": "1"}, r"--seed differs \(1, and 0 on rank 0\)"),
        (FACTS | {"the model": "b"}, "the model differs:"),
        ({}, "the model differs:"),
    ],
)
def test_what_must_be_the_same_is_named(theirs: dict[str, str], word: str) -> None:
    _, raised = both(theirs)
    with pytest.raises(ConfigError, match=word):
        raise raised


NESTED = (60_000).to_bytes(4, "little") + b"\x96\xa4Join\1\xc4\0\xc4\0\x80".ljust(60_000, b"\x91")


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n", b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", NESTED]
)
def test_others_who_connect_cost_nothing(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIME_TO_ANSWER", 0.2)
    with line_pair() as (leader, other):
        other._socket.sendall(sent)
        with pytest.raises((ValueError, TimeoutError)):
            admit(leader, FACTS)


def test_a_call_carries_its_arrays() -> None:
    matrix = np.arange(6, dtype=np.int32).reshape(2, 3).T
    arrays: list[Any] = [matrix, np.bool_(True), np.full(1, np.inf, np.float32)]
    with line_pair() as (leader, other):
        leader.send(Call(7, [Packed.of(each) for each in arrays]))
        leader.send(End())
        call = other.receive(within=TIMEOUT)
        assert call.program == 7
        for sent, received in zip(arrays, call.inputs, strict=True):
            assert received.array().dtype == sent.dtype
            np.testing.assert_array_equal(received.array(), sent)
        assert isinstance(other.receive(within=TIMEOUT), End)
        leader.close()
        with pytest.raises(EOFError):
            other.receive(within=TIMEOUT)


def test_a_line_that_is_closed_here_ends_a_wait(request: pytest.FixtureRequest) -> None:
    def wait(line: Line) -> None:
        line.receive()

    with line_pair() as (leader, _), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait, leader)
        leader.close()
        assert isinstance(waiting.exception(TIMEOUT), EOFError)


def test_a_host_that_is_silent_for_too_long_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says so by an error that is called like that of a wait with a limit."""

    class Silent:
        def recv(self, size: int) -> bytes:
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

    with line_pair() as (leader, _):
        with monkeypatch.context() as patch:
            patch.setattr(leader, "_socket", Silent())
            with pytest.raises(EOFError, match="timed out"):
                leader.receive()
        with pytest.raises(TimeoutError):
            leader.receive(within=0.01)
