"""Several processes that answer as one, and their expositions added up."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paged.http.app import create_app
from paged.http.peers import Peers, added, answering
from tests.http.fakes import FakeEngine


def exposition(scale: float, status: str) -> str:
    registry = CollectorRegistry()
    Gauge("pages", "Of the engine.", registry=registry).set(scale)
    Gauge("process_start_time_seconds", "A time.", registry=registry).set(scale)
    Counter("requests", "Requests.", ["status"], registry=registry).labels(status).inc(scale)
    Histogram("seconds", "Times.", buckets=(1, 5), registry=registry).observe(scale)
    return generate_latest(registry).decode()


def test_what_adds_up_is_added_and_the_rest_is_of_the_one_that_was_asked() -> None:
    whole = added(exposition(2, "200"), [exposition(7, "200"), exposition(1, "404")], {"pages"})
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(whole.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert values == {
        ("pages",): 2,
        ("process_start_time_seconds",): 2,
        ("requests_total", "200"): 9,
        ("requests_total", "404"): 1,
        ("seconds_bucket", "1.0"): 1,
        ("seconds_bucket", "5.0"): 2,
        ("seconds_bucket", "+Inf"): 3,
        ("seconds_count",): 3,
        ("seconds_sum",): 10,
    }


@asynccontextmanager
async def two_peers(folder: Path, **answers: Any) -> AsyncIterator[tuple[FakeEngine, Any]]:
    """An engine and a client of its application, whose two peers say the same."""
    paths = [str(folder / name) for name in "ab"]
    told = {name: lambda value=value: value for name, value in answers.items()}
    engine = FakeEngine()
    transport = httpx2.ASGITransport(create_app(engine, ["tiny"], peers=Peers(tuple(paths))))
    async with AsyncExitStack() as stack:
        client = httpx2.AsyncClient(transport=transport, base_url="http://test")
        await stack.enter_async_context(client)
        for path in paths:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            await stack.enter_async_context(answering(listener, told))
        yield engine, client


def test_load_is_that_of_all(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_peers(tmp_path, load=3) as (_, client):
            assert (await client.get("/load")).json() == {"server_load": 6}

    asyncio.run(run())


def test_health_is_that_of_all(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_peers(tmp_path, troubles=[]) as (engine, client):
            assert (await client.get("/health")).status_code == 200
            engine.errored = True
            assert (await client.get("/health")).status_code == 503

    asyncio.run(run())


def test_an_engine_that_is_dead_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_peers(tmp_path, troubles=["The engine of tiny has stopped"]) as (_, client):
            reply = await client.get("/health")
            assert reply.status_code == 503
            assert "The engine of tiny has stopped" in reply.json()["error"]["message"]

    asyncio.run(run())


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_peers(tmp_path, troubles=[], load=0) as (_, client):
            (tmp_path / "b").unlink()
            for path in ("/health", "/load", "/metrics"):
                reply = await client.get(path)
                assert reply.status_code == 503
                assert "does not answer" in reply.json()["error"]["message"]
                assert int(reply.headers["retry-after"]) > 0

    asyncio.run(run())
