"""/invocations answers as the route whose request it is given."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.http.app import create_app
from tests.http.api.test_disconnect import CHAT, PAUSE, send
from tests.http.fakes import FakeEngine, events
from tests.runtime.pooling.pooling_fakes import pooling_engine
from tests.runtime.remote import wait_until

MESSAGES = [{"role": "user", "content": "a"}]


def ask(client: TestClient, **body: Any) -> Any:
    reply = client.post("/invocations", json=body)
    assert reply.status_code == 200, reply.text
    return reply


def test_text(client: TestClient) -> None:
    assert ask(client, prompt="a").json()["object"] == "text_completion"
    assert ask(client, messages=MESSAGES).json()["object"] == "chat.completion"
    for body in ({"prompt": "a"}, {"messages": MESSAGES}):
        assert len(events(ask(client, stream=True, **body).text)) >= 6


def test_vectors_and_scores() -> None:
    engine = pooling_engine()
    client = TestClient(create_app(engine, ["tiny"]))
    assert ask(client, input="a").json()["data"][0]["object"] == "embedding"
    assert ask(client, text_1="a", text_2="b").json()["data"][0]["object"] == "score"
    assert ask(client, queries="a", documents=["b"]).json()["data"][0]["object"] == "score"
    assert len(ask(client, query="a", documents=["b", "c"]).json()["results"]) == 2
    reply = client.post("/invocations", json={"prompt": "a"})
    assert "generates no text" in reply.json()["error"]["message"]
    engine.shutdown()


def test_errors_are_those_of_the_route(client: TestClient) -> None:
    reply = client.post("/invocations", json={"prompt": "a", "temperature": -1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "temperature")
    reply = client.post("/invocations", json={"input": "a"})
    assert "--runner pooling" in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"{}", b'{"model": "tiny"}', b"[]", b"{", b"\xff"])
def test_bodies_of_no_route(client: TestClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert client.post("/invocations", content=body, headers=headers).status_code == 400
    assert client.post("/invocations", content=body).status_code == 400


def test_large_bodies_are_not_read(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, ["tiny"], max_body_size=100))
    assert client.post("/invocations", json={"prompt": "a" * 100}).status_code == 413


def test_a_client_that_goes_away(url: str, engine: FakeEngine) -> None:
    engine.answer, engine.pause = "x" * 60, PAUSE
    for stream in (False, True):
        client = send(url, "/invocations", CHAT | {"stream": stream})
        wait_until(lambda: len(engine.running) == 1)
        client.close()
        before = engine.num_tokens
        wait_until(lambda: not engine.running)
        assert engine.num_tokens - before <= 2, "those of a step or two"
