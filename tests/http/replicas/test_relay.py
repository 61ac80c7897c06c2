"""Requests that replicas answer: passed on, asked again where a replica dies, and joined."""

import pickle
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged.http.app import create_app
from paged.http.replicas.joined import Whole
from paged.http.replicas.relay import CutOff, Messages, Relay
from paged.http.replicas.replica import respond
from paged.http.replicas.reply_pipes import ReplicaLost
from paged.http.replicas.request import PAGE_BYTES, Asked, pages_of
from paged.runtime.errors import Overloaded
from tests.http.fakes import FakeEngine

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
STREAM = {**CHAT, "stream": True}


class Replicas:
    """Replicas that die after so many messages, one behind the other; the last lives."""

    def __init__(self, app: ASGIApp, *deaths: int) -> None:
        self.app, self.deaths = app, list(deaths)
        self.seen: list[Asked] = []
        self.refusal: Exception | None = None

    async def answer(self, request: Asked) -> Messages:
        self.seen.append(request)
        if self.refusal is not None:
            raise self.refusal
        messages = await collected(self.app, request)
        left = self.deaths.pop(0) if self.deaths else len(messages)
        for message in messages[:left]:
            yield [message]
        if left < len(messages):
            raise ReplicaLost("a replica has died")

    async def answers(self, request: Asked) -> Sequence[Whole]:
        found = []
        for name in ("a", "b"):
            head, *parts = await collected(self.app, request)
            body = b"".join(part.get("body", b"") for part in parts)
            found.append(Whole(name, head["status"], head["headers"], body))
        return found


async def collected(app: ASGIApp, request: Asked) -> list[Message]:
    found: list[Message] = []

    async def take(message: Message) -> None:
        found.append(message)

    await respond(app, request, take)
    return found


def fleet(*deaths: int, **door: Any) -> Replicas:
    return Replicas(create_app(FakeEngine(), ["tiny"], **door), *deaths)


def client_of(replicas: Replicas, max_body_size: int = 10_000) -> TestClient:
    return TestClient(Relay(replicas, max_body_size), raise_server_exceptions=False)


def test_a_reply_is_the_replica_s() -> None:
    client = client_of(fleet())
    reply = client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
    assert reply.json()["choices"][0]["message"]["content"] == "Hello!"
    assert reply.headers.get_list("x-request-id") == ["mine"]
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/nowhere").status_code == 404


def test_a_stream_comes_in_pieces() -> None:
    reply = client_of(fleet()).post("/v1/chat/completions", json=STREAM)
    assert reply.text.endswith("data: [DONE]\n\n")
    assert reply.text.count("data: ") >= 6


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("messages", [0, 1])
def test_another_replica_is_asked_if_one_dies_before_its_body(
    body: dict[str, Any], messages: int
) -> None:
    replicas = fleet(messages, messages)
    reply = client_of(replicas).post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    assert "Hello!" in reply.text or reply.text.endswith("data: [DONE]\n\n")
    assert len(replicas.seen) == 3


def test_a_request_that_three_replicas_die_of_is_given_up() -> None:
    replicas = fleet(0, 0, 0)
    reply = client_of(replicas).post("/v1/chat/completions", json=CHAT)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    assert "has stopped" in reply.json()["error"]["message"]
    assert "x-request-id" in reply.headers
    assert len(replicas.seen) == 3


@pytest.mark.parametrize(
    ("path", "ends"),
    [("/v1/chat/completions", "data: [DONE]\n\n"), ("/v1/messages", '"}}\n\n')],
)
def test_a_stream_that_has_begun_ends_with_an_error(path: str, ends: str) -> None:
    replicas = fleet(3)
    reply = client_of(replicas).post(path, json=STREAM)
    assert reply.status_code == 200
    assert '"error"' in reply.text
    assert "The replica that worked on this request has stopped" in reply.text
    assert reply.text.endswith(ends)
    assert len(replicas.seen) == 1


def test_a_body_that_is_cut_is_no_whole_reply() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    with pytest.raises(CutOff, match="has stopped"):
        TestClient(Relay(Replicas(app), 100)).get("/v1/models")


def test_too_many_that_wait_are_refused() -> None:
    replicas = fleet()
    replicas.refusal = Overloaded("Too many requests wait", retry_after=2)
    reply = client_of(replicas).post("/v1/chat/completions", json=CHAT)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")


def test_a_body_that_is_too_large_goes_to_no_replica() -> None:
    replicas = fleet()
    reply = client_of(replicas, 20).post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 413
    assert replicas.seen == []


def test_metrics_are_those_of_all_replicas() -> None:
    client = client_of(fleet())
    client.post("/v1/chat/completions", json=CHAT)
    lines = client.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("http_requests_total{")]
    assert [line.rpartition(" ")[2] for line in counted] == ["1.0", "1.0"]
    assert [name for name in "ab" if f'replica="{name}"' in "".join(counted)] == ["a", "b"]
    assert lines.count("# TYPE http_requests_total counter") == 1
    assert client.get("/load").json() == {"server_load": 0}


def test_what_one_replica_refuses_is_refused() -> None:
    client = client_of(fleet(api_keys=["key"], metrics_need_key=True))
    assert client.get("/metrics").status_code == 401
    assert client.get("/load").status_code == 401
    key = {"Authorization": "Bearer key"}
    assert client.get("/load", headers=key).json() == {"server_load": 0}


def test_a_scope_can_be_sent_to_another_process() -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        request = Request(scope, receive)
        await JSONResponse({"body": (await request.body()).decode()})(scope, receive, send)

    replicas = Replicas(app)
    reply = client_of(replicas).post("/v1/x?a=b", content=b"text", headers={"k": "v"})
    assert reply.json() == {"body": "text"}
    assert pickle.loads(pickle.dumps(replicas.seen[0])) == replicas.seen[0]
    assert scopes[0]["query_string"] == b"a=b"
    assert (b"k", b"v") in scopes[0]["headers"]


def body_of(*texts: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return msgspec.json.encode({**more, "messages": messages})


def test_conversations_that_begin_alike_share_pages() -> None:
    long = "word " * PAGE_BYTES
    first = pages_of(body_of(long, "a"))
    assert len(first) == 5
    assert pages_of(body_of(long, "b", long))[:5] == first
    assert pages_of(body_of(long, "a", temperature=0.5, stream=True)) == first
    for other in (body_of("x" + long), body_of(long, cache_salt="x"), body_of(long, model="m")):
        assert pages_of(other)[0] != first[0]


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b'"text"', b"{}", b"[" * 10_000, b"\xff"])
def test_what_has_no_prompt_has_no_pages(body: bytes) -> None:
    assert pages_of(body) == ()


def test_a_very_long_prompt_has_few_pages() -> None:
    assert len(pages_of(body_of("x" * 10**6))) == 1024
