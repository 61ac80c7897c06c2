"""What may answer at the address of a prefill server: nobody, somebody else, or one that stalls."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from paged.cache import PageStack
from paged.runtime.greeting import Hello, Refused
from paged.runtime.line import Line
from paged.runtime.transfer import handshake, peer
from paged.runtime.transfer.handshake import admit
from paged.runtime.transfer.landing import Landing, LineWay
from paged.runtime.transfer.messages import (
    Cancel,
    Failed,
    Finished,
    Introduction,
    Landed,
    Piece,
    Prefill,
    ToPrefill,
)
from paged.runtime.transfer.peer import Handover, Peer
from tests.runtime.remote import wait_until
from tests.runtime.transfer.test_transfer_door import FACTS, NONSENSE
from tests.runtime.transfer.test_transfer_landing import PAGE, contents


def stacked(parts: Sequence[NDArray[Any]]) -> PageStack:
    return tuple(jnp.asarray(each) for each in parts)


class Server:
    """The other end, driven by the test."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(30)
        self.peer = Peer(f"127.0.0.1:{self.port}", FACTS, PAGE, stacked)

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def accept(self) -> Line:
        return Line(self.listener.accept()[0], ToPrefill)

    def admit(self) -> Line:
        line = self.accept()
        admit(line, FACTS)
        wait_until(lambda: self.peer.can_be_asked)
        return line

    def ask(self, num_pages: int = 2) -> Handover:
        names = [bytes([number]) for number in range(num_pages)]
        handover = Handover(names, 4 * num_pages, Landing(PAGE, num_pages))
        self.peer.ask(handover, [1] * (4 * num_pages + 1), "", 0, [0])
        return handover


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Server]:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(peer, "_FIRST_DELAY", 0.01)
    server = Server()
    try:
        yield server
    finally:
        server.listener.close()
        server.peer.close()
        name = f"paged-prefill-127.0.0.1:{server.peer._address[1]}"
        wait_until(lambda: not [each for each in threading.enumerate() if each.name == name])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIME_TO_ANSWER", 0.1)


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_a_line_in_the_log_and_another_try(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = server.accept()
    line._socket.sendall(NONSENSE[name].replace(b"\x95\xacIntroduction", b"\x93\xa5Hello"))
    line.close()
    server.admit().close()
    assert "cannot be reached: " in caplog.text


def test_another_port_of_the_server_is_told_from_the_right_one(
    impatient: None, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A web server waits for a request."""
    line = server.accept()
    said = "does not greet as a prefill server does at its --kv-transfer-port (timed out)"
    wait_until(lambda: said in caplog.text)
    line.close()


def test_what_a_stranger_refuses_with_is_one_line(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    line = server.accept()
    line.send(Hello(b"1"))
    assert isinstance(line.receive(within=10), Introduction)
    line.send(Refused("a\r\nERROR: b\x1b[31m" + "c" * 10**4))
    wait_until(lambda: "refuses this engine: a ERROR: b?[31mccc" in caplog.text)
    [said] = [each.getMessage() for each in caplog.records if "refuses" in each.getMessage()]
    assert said.isprintable()
    assert len(said) < 700
    line.close()


@pytest.mark.parametrize(
    "message",
    [
        Piece(0, 2, 0, 0, 1),
        Piece(0, 0, 3, 0, 1),
        Piece(0, 0, -1, 0, 1),
        Piece(0, 0, 0, 1, 4),
        Piece(0, 0, 0, -1, 1),
        Piece(0, 0, 0, 0, 3),
        Piece(9, 0, 0, 0, 2**31),
        Landed(0, 2, 1),
        Landed(0, 0, 0),
        Landed(0, 0, -1),
        Hello(b""),
    ],
)
def test_what_has_no_place_ends_the_connection(server: Server, message: Any) -> None:
    line, handover = server.admit(), server.ask()
    line.send(message)
    assert handover.outcome.result(10).name == "lost"
    line.close()
    assert not handover.landed


def test_a_server_that_stalls_in_the_middle_of_a_page(server: Server) -> None:
    """It is asked for nothing until it is heard of; what comes late is taken, and dropped."""
    line, handover = server.admit(), server.ask()
    asked = line.receive(within=10)
    assert isinstance(asked, Prefill)
    line.send(Piece(asked.number, 0, 0, 0, 1))
    content = contents(0, 1).tobytes()
    line._socket.sendall(content[:7])
    wait_until(lambda: handover.last_news > handover.started)
    server.peer.give_up(handover, "nothing was heard")
    assert handover.outcome.result(10) == ("timeout", "nothing was heard")
    assert line.receive(within=10) == Cancel(asked.number)
    assert not server.peer.can_be_asked
    line._socket.sendall(content[7:])
    LineWay(line, asked.number).put(0, 1, 0, contents(0, 1))
    wait_until(lambda: server.peer.can_be_asked)
    line.send(Failed(asked.number, "it was cancelled"))
    again = server.ask(1)
    number = line.receive(within=10).number
    for index in range(len(PAGE)):
        for layer in range(3):
            LineWay(line, number).put(index, layer, 0, contents(index, 1))
    line.send(Landed(number, 0, 1))
    line.send(Finished(number))
    assert again.outcome.result(10).name == "done"
    [(first, stack)] = again.landed
    assert first == 0
    assert np.array_equal(stack[0][0, 2], contents(0, 1)[0])
    line.close()


def test_a_server_that_was_silent_and_has_come_back_is_asked(server: Server) -> None:
    line, handover = server.admit(), server.ask()
    server.peer.give_up(handover, "")
    line.close()
    server.admit().close()


def test_a_server_whose_last_word_came_as_it_was_given_up_is_asked(server: Server) -> None:
    """It has nothing left to say, which would be waited for in vain."""
    line, handover = server.admit(), server.ask()
    line.send(Finished(line.receive(within=10).number))
    assert handover.outcome.result(10).name == "done"
    server.peer.give_up(handover, "nothing was heard")
    assert server.peer.can_be_asked
    line.close()


def test_reasons_are_one_line(server: Server) -> None:
    """What XLA says of an error has many."""
    line, handover = server.admit(), server.ask()
    line.send(Failed(line.receive(within=10).number, "no memory:\n  1 GiB\n  of 2"))
    assert handover.outcome.result(10) == ("refused", "no memory: 1 GiB of 2")
    line.close()
