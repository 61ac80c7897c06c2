"""A line for each request: what it says, and what it never says unless it is asked to."""

import json
import logging

import pytest
from starlette.testclient import TestClient

from paged.http.app import create_app
from paged.http.cli import parse
from paged.http.options import ServeOptions
from paged.http.request_log import RequestLog
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.logs import JsonFormatter
from tests.http.fakes import FakeEngine


def logged(
    caplog: pytest.LogCaptureFixture, engine: FakeEngine, log: RequestLog, **body: object
) -> logging.LogRecord:
    """The one line of a request."""
    caplog.set_level(logging.INFO, "paged.http")
    client = TestClient(create_app(engine, ["tiny"], reporters=[log]))
    client.post("/v1/completions", json={"prompt": "secret"} | body)
    [record] = caplog.records
    return record


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_line(
    caplog: pytest.LogCaptureFixture, engine: FakeEngine, stream: bool
) -> None:
    log = RequestLog(engine.tokenizer)
    record = logged(caplog, engine, log, stream=stream, n=2, temperature=1)
    found = json.loads(JsonFormatter().format(record))
    assert found["request_id"].startswith("cmpl-")
    assert found["request_id"].endswith("-0")
    assert (found["model"], found["level"]) == ("tiny", "INFO")
    assert (found["prompt_tokens"], found["cached_tokens"]) == (7, 1)
    assert found["generated_tokens"] == [6, 6]
    assert found["finish_reasons"] == ["stop", "stop"]
    assert 0 <= found["queue_ms"] <= found["first_token_ms"] <= found["total_ms"]
    assert "7 prompt tokens (1 cached), 6+6 generated, stop+stop, queued" in record.message
    assert "secret" not in str(found) + record.message
    assert "Hello" not in str(found) + record.message


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_outputs_are_shown_when_asked_for(
    caplog: pytest.LogCaptureFixture, engine: FakeEngine, stream: bool
) -> None:
    log = RequestLog(engine.tokenizer, max_length=4, outputs=True)
    record = logged(caplog, engine, log, stream=stream)
    assert record.message.endswith(", prompt '\\x00sec', outputs ['Hell']")


def test_outputs_are_whole_without_a_length(
    caplog: pytest.LogCaptureFixture, engine: FakeEngine
) -> None:
    record = logged(caplog, engine, RequestLog(None, outputs=True))
    assert record.message.endswith(", outputs ['Hello!']")


def test_a_request_that_fails_is_a_line_too(
    caplog: pytest.LogCaptureFixture, engine: FakeEngine
) -> None:
    engine.fails_after = 2
    caplog.set_level(logging.INFO, "paged.http.request_log")
    client = TestClient(
        create_app(engine, ["tiny"], reporters=[RequestLog(None)]), raise_server_exceptions=False
    )
    client.post("/v1/completions", json={"prompt": "a"})
    [record] = [each for each in caplog.records if each.name == "paged.http.request_log"]
    assert ", 2 prompt tokens (0 cached), 0 generated, error, took " in record.message


def test_a_request_that_is_refused_is_none(
    caplog: pytest.LogCaptureFixture, engine: FakeEngine
) -> None:
    caplog.set_level(logging.INFO, "paged.http")
    client = TestClient(create_app(engine, ["tiny"], reporters=[RequestLog(None)]))
    assert client.post("/v1/completions", json={"prompt": "a" * 99}).status_code == 400
    assert caplog.records == []


def test_errors_in_json_have_their_trace() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        kind = (type(error), error, error.__traceback__)
        record = logging.LogRecord("paged", logging.ERROR, "", 0, "it %s", ("broke",), kind)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == "it broke"
    assert found["trace"].endswith("ValueError: a\nb")
    assert found["time"].endswith("Z")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--enable-log-outputs"], "--enable-log-outputs needs --enable-log-requests"),
        (["--max-log-len", "-1"], "--max-log-len must be at least 0, got -1"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_flags(ServeOptions, parse(["serve", *flags]))
