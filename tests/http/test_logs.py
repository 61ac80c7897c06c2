"""What a server's log leaves out, and its line on the engine: while there is work, then quiet."""

import asyncio
import json
import logging

import msgspec
import pytest

from paged.http.logs import configure_logging, describe, leave_out, log_stats
from paged.runtime.logs import JsonFormatter, current_format, log_to_stderr
from tests.http.fakes import FakeEngine

ACCESS, ERROR = logging.getLogger("uvicorn.access"), logging.getLogger("uvicorn.error")

IDLE = FakeEngine().stats()


def test_uvicorn_tells_only_of_trouble(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging("info")
    ERROR.info("Started server process")
    ERROR.error("Exception in ASGI application")
    ACCESS.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", "/v1/models", "1.1", 200)
    assert caplog.messages == [
        "Exception in ASGI application",
        '127.0.0.1:5 - "GET /v1/models HTTP/1.1" 200',
    ]


def test_paths_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging("info")
    leave_out("/health, /metrics")
    for path in ("/health", "/metrics?name=a", "/healthy"):
        ACCESS.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", path, "1.1", 200)
    assert caplog.messages == ['127.0.0.1:5 - "GET /healthy HTTP/1.1" 200']


def test_a_status_page_that_asks_again_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging("info")
    for path, status in (
        ("/status.json", 200),
        ("/models/status.json", 200),
        ("/status.json", 401),
    ):
        ACCESS.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", path, "1.1", status)
    assert caplog.messages == ['127.0.0.1:5 - "GET /status.json HTTP/1.1" 401']


def test_a_query_hides_no_request(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging("info")
    for path in ("/v1/models?/status.json", "/status.json?a"):
        ACCESS.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", path, "1.1", 200)
    assert caplog.messages == ['127.0.0.1:5 - "GET /v1/models?/status.json HTTP/1.1" 200']


def test_lines_on_http_requests_have_parts(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging("info", "json")
    ACCESS.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", "/v1/models", "1.1", 200)
    found = json.loads(JsonFormatter().format(caplog.records[0]))
    assert (found["client"], found["method"], found["path"]) == ("127.0.0.1:5", "GET", "/v1/models")
    assert found["status"] == 200


def test_the_format_is_known_to_those_who_start_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_to_stderr("INFO", "paged", log_format="json")
    assert current_format() == "json"
    monkeypatch.setattr(root, "handlers", [])
    log_to_stderr("INFO", "paged")
    assert current_format() == "text"


def test_the_line_on_the_engine() -> None:
    after = msgspec.structs.replace(
        IDLE, num_running=3, num_waiting=1, prompt_tokens=500, generation_tokens=25
    )
    assert describe(IDLE, after, seconds=10) == (
        "Avg prompt throughput: 50.0 tokens/s, "
        "Avg generation throughput: 2.5 tokens/s, Running: 3 reqs, Waiting: 1 reqs, "
        "GPU KV cache usage: 25.0%, Prefix cache hit rate: 75.0%"
    )


def test_no_line_when_idle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = msgspec.structs.replace(IDLE, num_running=1)
    stepped = msgspec.structs.replace(IDLE, num_steps=IDLE.num_steps + 1)
    snapshots = iter([IDLE, IDLE, running, running, IDLE, IDLE, stepped, stepped, stepped])
    engine = FakeEngine()
    monkeypatch.setattr(engine, "stats", lambda: next(snapshots))
    caplog.set_level(logging.INFO, "paged.http")

    async def until_out_of_snapshots() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await log_stats(engine, interval=0.001)

    asyncio.run(until_out_of_snapshots())
    states = ["Running: 1" in record.message for record in caplog.records]
    assert states == [True, True, False, False, False]
