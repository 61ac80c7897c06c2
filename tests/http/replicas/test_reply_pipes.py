"""Replies by TCP from replicas to a router: parts in order, ends, breaks and strangers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import uvloop
from starlette.types import Message

from paged.http.app import create_app
from paged.http.replicas import reply_pipes
from paged.http.replicas.replica import respond
from paged.http.replicas.reply_pipes import (
    Address,
    Inbox,
    Inboxes,
    Part,
    Pipes,
    ReplicaLost,
    watch,
)
from paged.http.replicas.request import asked
from paged.runtime.errors import Overloaded
from tests.http.fakes import FakeEngine

HEAD: Message = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}


def body(text: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


def run[T](test: Callable[[Inboxes, Address, Pipes], Coroutine[Any, Any, T]]) -> T:
    async def within() -> T:
        inboxes, pipes = Inboxes(), Pipes()
        address = await inboxes.address("127.0.0.1")
        try:
            async with asyncio.timeout(20):
                return await test(inboxes, address, pipes)
        finally:  # what ends with its process elsewhere
            inboxes._server.close()
            for task in pipes._pipes.values():
                if task.exception() is None:
                    task.result()._transport.abort()
            await asyncio.sleep(0.05)

    return uvloop.run(within())  # as Ray Serve does


async def read_all(inbox: Inbox) -> list[Message]:
    found: list[Message] = []
    while messages := await inbox.read():
        found += messages
    return found


def test_parts_come_in_order_each_to_its_own_request() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        opened = [inboxes.open() for _ in range(3)]
        pipe = await pipes.to(address)
        assert await pipes.to(address) is pipe
        for inbox in opened:
            await pipe.send(inbox.number, HEAD)
        for turn in range(50):
            for inbox in opened:
                text = f"{inbox.number} {turn} ".encode() * 1000
                await pipe.send(inbox.number, body(text, more=turn < 49))
        for inbox in opened:
            pipe.end(inbox.number)
        for inbox in opened:
            head, *parts = await read_all(inbox)
            assert head == {**HEAD, "headers": [(b"a", b"b")]}
            words = b"".join(part["body"] for part in parts).split()
            assert words[1::2] == [b"%d" % turn for turn in range(50) for _ in range(1000)]
            assert set(words[::2]) == {b"%d" % inbox.number}
            assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
            inboxes.close(inbox)

    run(test)


def test_parts_that_wait_are_joined() -> None:
    inbox = Inbox(1)
    for part in (Part(1, status=200), *(Part(1, b"x", more=turn < 2) for turn in range(3))):
        inbox.take(part)
    inbox.take(Part(1, more=None))
    head, joined = asyncio.run(read_all(inbox))
    assert (head["status"], joined["body"], joined["more_body"]) == (200, b"xxx", False)


def test_what_comes_late_is_dropped() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        gone, there = inboxes.open(), inboxes.open()
        inboxes.close(gone)
        pipe = await pipes.to(address)
        for inbox in (gone, there):
            await pipe.send(inbox.number, body(b"x"))
            pipe.end(inbox.number)
        assert await read_all(there) == [body(b"x")]

    run(test)


def test_a_connection_that_breaks_fails_what_came_by_it() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        begun, other = inboxes.open(), inboxes.open()
        pipe = await pipes.to(address)
        await pipe.send(begun.number, body(b"x"))
        assert await begun.read() == [body(b"x")]
        pipe._transport.abort()
        with pytest.raises(ReplicaLost, match="broke"):
            await begun.read()
        with pytest.raises(ConnectionError, match="broke"):
            await pipe.send(begun.number, body(b"y"))
        again = await pipes.to(address)
        again.end(other.number)
        assert await other.read() == []

    run(test)


def test_what_came_before_a_failure_is_read_first() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        inbox = inboxes.open()
        pipe = await pipes.to(address)
        await pipe.send(inbox.number, body(b"x"))
        while not inbox._came:
            await asyncio.sleep(0.01)
        inbox.fail(ReplicaLost("gone"))
        assert await inbox.read() == [body(b"x")]
        with pytest.raises(ReplicaLost, match="gone"):
            await inbox.read()

    run(test)


def test_a_stranger_is_not_heard() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        inbox = inboxes.open()
        stranger = await pipes.to(replace(address, key=b"?" * 32))
        await stranger.send(inbox.number, body(b"x"))
        await stranger.gone.wait()
        honest = await pipes.to(address)
        honest.end(inbox.number)
        assert await inbox.read() == []

    run(test)


def test_nobody_there_is_an_error() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        with pytest.raises(OSError, match=r"."):
            await pipes.to(replace(address, port=1))

    run(test)


@asynccontextmanager
async def answering(
    engine: FakeEngine, send: Callable[[Message], Awaitable[None]]
) -> AsyncIterator[asyncio.Task[None]]:
    request = asked(SCOPE, b'{"prompt": "a", "max_tokens": 60, "stream": true}')
    task = asyncio.create_task(respond(create_app(engine, ["tiny"]), request, send))
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_request_ends_when_it_is_cancelled() -> None:
    engine = FakeEngine(answer="x" * 60, pause=0.01)

    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        inbox = inboxes.open()
        pipe = await pipes.to(address)
        async with answering(engine, partial(pipe.send, inbox.number)):
            await inbox.read()
            assert len(engine.running) == 1
        assert len(engine.aborted) == 1

    run(test)


def test_a_request_ends_when_its_router_has_gone() -> None:
    engine = FakeEngine(answer="x" * 60, pause=0.01)

    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        inbox = inboxes.open()
        pipe = await pipes.to(address)
        async with answering(engine, partial(pipe.send, inbox.number)) as task:
            await inbox.read()
            pipe._transport.abort()
            await asyncio.gather(task, return_exceptions=True)
            assert len(engine.aborted) == 1

    run(test)


def test_a_request_that_sends_nothing_yet_ends_when_its_router_has_gone() -> None:
    engine = FakeEngine(answer="x" * 60, pause=0.1)
    request = asked(SCOPE, b'{"prompt": "a", "max_tokens": 60}')

    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        pipe = await pipes.to(address)
        send = partial(pipe.send, inboxes.open().number)
        replying = respond(create_app(engine, ["tiny"]), request, send, pipe.gone)
        task = asyncio.create_task(replying)
        while not engine.running:
            await asyncio.sleep(0.01)
        pipe._transport.abort()
        await asyncio.gather(task, return_exceptions=True)
        assert len(engine.aborted) == 1

    run(test)


async def returned() -> None:
    """A call that has ended well."""


async def raised(error: BaseException) -> None:
    raise error


def test_a_reply_whose_end_is_lost_with_its_connection_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_pipes, "_SECONDS_ON_THE_WAY", 0.05)

    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        inbox = inboxes.open()
        pipe = await pipes.to(address)
        await pipe.send(inbox.number, body(b"x", more=False))
        pipe.end(inbox.number)
        pipe._transport.abort()  # before this turn's parts are sent
        await watch(returned(), inbox)
        with pytest.raises(ReplicaLost, match="lost on its way"):
            await inbox.read()

    run(test)


def test_a_reply_may_come_later_than_its_call_ends() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        inbox = inboxes.open()
        await watch(returned(), inbox)
        pipe = await pipes.to(address)
        await pipe.send(inbox.number, body(b"x", more=False))
        pipe.end(inbox.number)
        assert await read_all(inbox) == [body(b"x", more=False)]

    run(test)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Overloaded("no room"), Overloaded),
        (ConnectionError("gone"), ReplicaLost),
        (TypeError("cannot be sent"), ReplicaLost),
        (asyncio.CancelledError(), ReplicaLost),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_call_that_fails_in_any_way_ends_its_reply(
    error: BaseException, expected: type[Exception]
) -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        inbox = inboxes.open()
        await asyncio.gather(watch(raised(error), inbox), return_exceptions=True)
        with pytest.raises(expected):
            await inbox.read()

    run(test)


def test_a_reply_cannot_end_on_a_connection_that_broke() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        pipe = await pipes.to(address)
        pipe._transport.abort()
        await pipe.gone.wait()
        with pytest.raises(ConnectionError, match="broke"):
            pipe.end(inboxes.open().number)

    run(test)


def test_who_gives_up_while_the_router_begins_to_listen_takes_no_other_along() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        others = Inboxes()
        first, second = (asyncio.create_task(others.address("127.0.0.1")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).port
        others._server.close()

    run(test)


def test_a_router_that_could_not_listen_tries_again() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        others = Inboxes()
        with pytest.raises(OSError, match=r"."):
            await others.address("192.0.2.1")  # nobody's, for documents
        assert (await others.address("127.0.0.1")).port
        others._server.close()

    run(test)


def test_one_who_connects_and_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_pipes, "_SECONDS_TO_TELL_THE_KEY", 0.05)

    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        assert await reader.read() == b""
        writer.close()

    run(test)


def test_a_router_that_does_not_take_connections_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_pipes, "_SECONDS_TO_CONNECT", 0.05)

    async def never(*args: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
        with pytest.raises(TimeoutError):
            await pipes.to(address)

    run(test)


def test_routers_that_have_gone_are_forgotten() -> None:
    async def test(inboxes: Inboxes, address: Address, pipes: Pipes) -> None:
        with pytest.raises(OSError, match=r"."):
            await pipes.to(replace(address, port=1))
        await pipes.to(address)
        assert list(pipes._pipes) == [address]

    run(test)
