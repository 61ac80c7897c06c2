"""What clients are told when there is no room, or no time, in every route and both ways to ask."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from paged.http.app import create_app
from paged.runtime.errors import Overloaded
from tests.http.api.test_disconnect import send
from tests.http.fakes import FakeEngine, events
from tests.runtime.remote import wait_until

MESSAGES = [{"role": "user", "content": "a"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
every_route = pytest.mark.parametrize("path", ROUTES)
both_ways = pytest.mark.parametrize("stream", [False, True])
BAD_TIMEOUTS = [0, -1, -0.0, 1e300, 604_801, -1e300]


def told(reply: Any) -> tuple[str, str]:
    """Type and message of an error."""
    error = reply.json()["error"]
    return error["type"], error["message"]


@every_route
@both_ways
def test_a_full_queue(client: TestClient, engine: FakeEngine, path: str, stream: bool) -> None:
    engine.room = 0
    reply = client.post(path, json=ROUTES[path] | {"stream": stream})
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "3"
    kind = "overloaded_error" if path == "/v1/messages" else "ServiceUnavailableError"
    assert told(reply) == (kind, "The queue is full: 7 sequences wait")
    assert engine.seen == []
    assert engine.tokenizer is not None
    assert engine.tokenizer.threads == [], "nothing was tokenised for it"


@every_route
@both_ways
def test_the_engine_has_the_last_word(
    client: TestClient, engine: FakeEngine, path: str, stream: bool
) -> None:
    engine.refusal = Overloaded("The queue is full", "tokens", 61.2)
    reply = client.post(path, json=ROUTES[path] | {"stream": stream})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "62")
    assert told(reply)[1] == "The queue is full"


def test_each_of_n_and_each_prompt_counts(client: TestClient, engine: FakeEngine) -> None:
    engine.room = 5
    body = {"prompt": ["a", "b"], "temperature": 1}
    assert client.post("/v1/completions", json=body | {"n": 3}).status_code == 503
    assert client.post("/v1/completions", json=body | {"n": 2}).status_code == 200
    first, second = (each.terms for each in engine.seen)
    assert first is not None
    assert second is not None
    assert (first.num_sequences, first.num_tokens) == (4, 4)
    assert (second.num_sequences, second.num_tokens) == (0, 0), "the first has asked for both"


def test_counting_tokens_needs_no_room(client: TestClient, engine: FakeEngine) -> None:
    engine.room = 0
    body = ROUTES["/v1/messages"]
    assert client.post("/v1/messages/count_tokens", json=body).status_code == 200
    assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200


@every_route
@pytest.mark.parametrize("how", ["field", "header", "both", "default"])
def test_a_timeout_is_a_deadline(engine: FakeEngine, path: str, how: str) -> None:
    client = TestClient(create_app(engine, ["tiny"], default_timeout=30))
    field = {"timeout": 30} if how in ("field", "both") else {}
    header = {"header": "30", "both": "5"}.get(how)
    headers = {} if header is None else {"X-Request-Timeout": header}
    before = time.monotonic()
    assert client.post(path, json=ROUTES[path] | field, headers=headers).status_code == 200
    terms = engine.seen[0].terms
    assert terms is not None
    assert before + 30 <= terms.deadline <= time.monotonic() + 30


def test_without_one_there_is_no_deadline(client: TestClient, engine: FakeEngine) -> None:
    client.post("/v1/completions", json={"prompt": "a", "timeout": None})
    assert engine.seen[0].terms is not None
    assert engine.seen[0].terms.deadline == 0


@every_route
@pytest.mark.parametrize("value", BAD_TIMEOUTS)
def test_timeouts_that_are_none(client: TestClient, path: str, value: float) -> None:
    reply = client.post(path, json=ROUTES[path] | {"timeout": value})
    assert reply.status_code == 400
    assert "timeout must be above 0 and at most 604800 seconds" in told(reply)[1]


@pytest.mark.parametrize("text", ["", "soon", "nan", "-inf", "inf", "0", "1e999", "-5", "30s"])
def test_headers_that_are_none(client: TestClient, text: str) -> None:
    headers = {"X-Request-Timeout": text}
    reply = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert reply.status_code == 400
    assert told(reply)[1].startswith("X-Request-Timeout must be above 0")


@pytest.mark.parametrize("body", [b'{"prompt": "a", "timeout": NaN}', b'{"timeout": "9"}'])
def test_values_of_the_wrong_type(client: TestClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert client.post("/v1/completions", content=body, headers=headers).status_code == 400


@every_route
def test_an_answer_that_is_late(client: TestClient, engine: FakeEngine, path: str) -> None:
    engine.ends_with = "timeout"
    reply = client.post(path, json=ROUTES[path])
    assert reply.status_code == 504
    assert reply.headers["x-should-retry"] == "false"
    kind = "timeout_error" if path == "/v1/messages" else "TimeoutError"
    assert told(reply) == (kind, "The request was not answered within its time")


def test_a_stream_that_is_late(client: TestClient, engine: FakeEngine) -> None:
    engine.ends_with = "timeout"
    reply = client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
    assert reply.status_code == 200
    *_, last = events(reply.text)
    assert last["error"]["type"] == "TimeoutError"
    assert last["error"]["code"] == 504


def test_a_typed_stream_that_is_late(client: TestClient, engine: FakeEngine) -> None:
    engine.ends_with = "timeout"
    reply = client.post("/v1/responses", json={"input": "a", "stream": True})
    assert "response.failed" in reply.text
    reply = client.post("/v1/messages", json=ROUTES["/v1/messages"] | {"stream": True})
    assert "timeout_error" in reply.text


def test_a_client_that_goes_away_while_its_prompt_is_tokenised(
    url: str, engine: FakeEngine
) -> None:
    """It has not come to the engine then, or leaves it again."""
    engine.answer, engine.pause = "x" * 60, 0.05
    client = send(url, "/v1/completions", {"prompt": "a " * 20_000})
    client.close()
    wait_until(lambda: not engine.running)
    reply = httpx2.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert reply.status_code == 200
    assert engine.running == set()


def test_the_error_is_json_whatever_was_asked(client: TestClient, engine: FakeEngine) -> None:
    engine.room = 0
    reply = client.post("/v1/completions", json={"prompt": ["a"] * 1_000})
    assert json.loads(reply.content)["error"]["code"] == reply.status_code == 503
