"""Where the next request may come to another process, no response is kept."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.http.app import create_app
from paged.http.peers import Peers
from tests.http.fakes import FakeEngine

ADVICE = "send the whole conversation in `input`, or start the server with --api-server-count 1"


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, ["tiny"], peers=Peers(("another",)))) as client:
        yield client


def ask(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/responses", json={"input": "Hi", **fields})


@pytest.mark.parametrize("fields", [{}, {"store": True}, {"store": False}])
def test_a_response_says_that_it_is_not_kept(client: TestClient, fields: dict[str, Any]) -> None:
    reply = ask(client, **fields).json()
    assert reply["status"] == "completed"
    assert reply["store"] is False
    streamed = ask(client, stream=True, **fields).text
    assert '"store":true' not in streamed
    assert "response.completed" in streamed


@pytest.mark.parametrize(
    "fields",
    [{"background": True}, {"previous_response_id": "resp_1"}],
    ids=lambda each: next(iter(each)),
)
def test_what_needs_a_kept_one_is_refused(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    reply = ask(client, **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == next(iter(fields))
    assert error["message"].endswith(ADVICE)
    assert not engine.seen


@pytest.mark.parametrize(("verb", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel")])
def test_so_is_asking_for_one(client: TestClient, verb: str, path: str) -> None:
    response_id = ask(client).json()["id"]
    reply = client.request(verb, f"/v1/responses/{response_id}{path}")
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith(ADVICE)
