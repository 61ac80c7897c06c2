"""Whoever comes to the door of a prefill engine: nobody of ours, too many, or with nonsense."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import pytest

from paged.runtime.greeting import Hello
from paged.runtime.line import Line
from paged.runtime.transfer import door, handshake
from paged.runtime.transfer.door import Door, Job
from paged.runtime.transfer.handshake import introduce
from paged.runtime.transfer.messages import Introduction, Prefill, ToDecode
from tests.runtime.remote import wait_until
from tests.runtime.transfer.test_transfer_landing import PAGE

FACTS = {"--block-size": "4"}
NONSENSE = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no type": b"\x01\0\0\0\xc1",
    "the end in the middle": b"\x40\0\0\0\x94",
    "text that is none": b"\x04\0\0\0\x91\xa2\xff\xff",
    "nested too deep": (60_010).to_bytes(4, "little")
    + b"\x95\xacIntroduction\xc4\0\xc4\0\x80".ljust(60_009, b"\x91")
    + b"\0",
}


@pytest.fixture
def opened(caplog: pytest.LogCaptureFixture) -> Iterator[Door]:
    caplog.set_level(logging.INFO)
    listener = socket.create_server(("127.0.0.1", 0))
    door = Door(listener, FACTS, PAGE, (None,))
    try:
        yield door
    finally:
        door.close()
        names = "paged-door", "paged-decode", "paged-pages"
        wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(names)])


def come_in(opened: Door) -> Line:
    line = Line(socket.create_connection(("127.0.0.1", opened.port), 10), ToDecode)
    try:
        introduce(line, FACTS)
    except BaseException:
        line.close()
        raise
    return line


def is_over(line: Line) -> bool:
    with pytest.raises(EOFError):
        line.receive(within=10)
    return True


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_a_line_in_the_log_and_no_more(
    opened: Door, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings are errors in tests, and so is what a thread raises."""
    with socket.create_connection(("127.0.0.1", opened.port), 10) as stranger:
        stranger.sendall(NONSENSE[name])
        with suppress(OSError):  # it may have been shown out already
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(2**16):
                pass
    wait_until(lambda: "is not admitted: " in caplog.text)
    come_in(opened).close()


def test_what_strangers_say_is_one_line(opened: Door, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", opened.port), 10) as stranger:
        line = Line(stranger, ToDecode)
        line.receive(within=10)
        body = msgspec.msgpack.encode(["a\nERROR: b\x1b[31m" + "c" * 10**4])
        stranger.sendall(len(body).to_bytes(4, "little") + body)
        wait_until(lambda: "is not admitted: " in caplog.text)
    [said] = [each.getMessage() for each in caplog.records if "admitted" in each.getMessage()]
    assert "a ERROR: b?[31mccc" in said
    assert said.isprintable()
    assert len(said) < 700


def test_who_says_nothing_does_not_keep_a_place(
    opened: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "TIME_TO_ANSWER", 0.1)
    with socket.create_connection(("127.0.0.1", opened.port), 10):
        wait_until(lambda: "is not admitted: timed out" in caplog.text)
        wait_until(lambda: not opened._lines)


def test_one_more_than_there_is_room_for(
    opened: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_MOST_CONNECTIONS", 3)
    monkeypatch.setattr(door, "_AFTER_FAILURE", 0.01)
    with ExitStack() as inside:
        lines = [come_in(opened) for _ in range(3)]
        for each in lines:
            inside.callback(each.close)
        with pytest.raises((EOFError, ConnectionError)):
            come_in(opened)
        wait_until(lambda: "is not served: 3 others are connected" in caplog.text)
        wait_until(lambda: opened.num_connected == 3)  # each is, a moment after it is welcomed
        lines[0].close()
        wait_until(lambda: len(opened._lines) == 2)
        inside.callback(come_in(opened).close)


def test_without_a_thread_for_somebody_the_next_one_is_served(
    opened: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_AFTER_FAILURE", 0.01)
    with monkeypatch.context() as patch:

        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises((EOFError, ConnectionError)):
            come_in(opened)
    wait_until(lambda: "is not served: can't start new thread" in caplog.text)
    come_in(opened).close()


def test_without_descriptors_the_door_does_not_spin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who waits to be accepted waits on, so that the next try fails as soon as the first."""
    tries = 0

    class Exhausted(socket.socket):
        def accept(self) -> Any:
            nonlocal tries
            tries += 1
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(door, "_AFTER_FAILURE", 0.05)
    opened = Door(Exhausted(), FACTS, PAGE, (None,))
    wait_until(lambda: tries > 2)
    first, began = tries, time.monotonic()
    threading.Event().wait(0.5)
    more = tries - first
    assert more <= (time.monotonic() - began) / 0.05 + 2
    opened.close()
    assert "is not served: [Errno 24] Too many open files" in caplog.text
    opened._thread.join(10)
    assert not opened._thread.is_alive()


@pytest.mark.parametrize(
    ("num_tokens", "first", "said"),
    [
        (9, [0, 0], "pages from [0, 0] on, of 2"),
        (9, [3], "pages from [3] on, of 2"),
        (9, [-1], "pages from [-1] on, of 2"),
        (9, [2], "without a page that is wanted"),
        (1, [0], "without a page that is wanted"),
        (0, [0], "pages from [0] on, of -1"),
    ],
)
def test_a_prompt_that_makes_no_sense_ends_the_connection(
    opened: Door, caplog: pytest.LogCaptureFixture, num_tokens: int, first: list[int], said: str
) -> None:
    line = come_in(opened)
    line.send(Prefill(0, [1] * num_tokens, "", 0, first, None))
    assert is_over(line)
    wait_until(lambda: said in caplog.text)
    line.close()
    assert not any(isinstance(each, Job) for each in opened.news())


def test_whoever_is_in_introduces_itself_once(
    opened: Door, caplog: pytest.LogCaptureFixture
) -> None:
    line = come_in(opened)
    line.send(Introduction(b"", b"", {}))
    assert is_over(line)
    wait_until(lambda: "it sends Introduction out of turn" in caplog.text)
    line.close()


def test_a_prefill_engine_greets_first(opened: Door) -> None:
    with socket.create_connection(("127.0.0.1", opened.port), 10) as stranger:
        assert isinstance(Line(stranger, ToDecode).receive(within=10), Hello)
