"""Health, version, and the keys that guard the rest."""

from typing import Any

import httpx2
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

import paged
from paged.http.app import create_app
from tests.http.fakes import FakeEngine
from tests.runtime.remote import wait_until

SLOW = {"prompt": "a", "max_tokens": 60, "stream": True}
KEYS = ["first-key", "clé"]


def test_health_follows_the_engine(client: TestClient, engine: FakeEngine) -> None:
    probes = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
    for verb, path in probes:
        reply = client.request(verb, path)
        assert (reply.status_code, reply.content) == (200, b"")
    engine.errored = True
    assert {client.request(*probe).status_code for probe in probes} == {503}


def test_version(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": paged.__version__}


def test_load_counts_what_is_being_answered(
    client: TestClient, url: str, engine: FakeEngine
) -> None:
    engine.answer, engine.pause = "x" * 60, 0.2

    def load() -> int:
        return httpx2.get(f"{url}/load").json()["server_load"]

    assert client.get("/load").json() == {"server_load": 0}
    assert load() == 0
    with httpx2.stream("POST", f"{url}/v1/completions", json=SLOW) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert load() == 1
    wait_until(lambda: load() == 0)


def test_the_tokenizer_is_told_where_that_is_wanted(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/tokenizer_info").status_code == 404
    told = TestClient(create_app(engine, ["tiny"], tells_tokenizer=True)).get("/tokenizer_info")
    assert told.json()["bos_token"] == "\0"
    assert told.json()["eos_token"] is None
    assert told.json()["chat_template"] == "{{ messages }}"
    app = create_app(engine, ["tiny"], tells_tokenizer=True, chat_template="{{ mine }}")
    assert TestClient(app).get("/tokenizer_info").json()["chat_template"] == "{{ mine }}"


def test_errors_under_a_path_are_those_of_the_route(engine: FakeEngine) -> None:
    for keys in ([], KEYS):
        app = create_app(engine, ["tiny"], api_keys=keys)
        reply = TestClient(app, root_path="/a").post("/a/v1/messages", json={})
        assert reply.json()["type"] == "error"
        reply = TestClient(app, root_path="/a").post("/a/v1/responses", json={})
        assert reply.json()["error"]["code"] == reply.status_code


@pytest.fixture
def guarded(engine: FakeEngine) -> TestClient:
    return TestClient(create_app(engine, ["tiny"], api_keys=KEYS))


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_admits(guarded: TestClient, key: str) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = {b"Authorization": f"{scheme} {key}".encode()}
        assert guarded.get("/v1/models", headers=headers).status_code == 200
    both = {b"Authorization": b"Bearer other", b"X-Api-Key": key.encode()}
    for headers in ({b"X-Api-Key": key.encode()}, both):
        assert guarded.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"X-Api-Key": "first-ke"},
        {"X-Api-Key": ""},
        {b"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_anything_else_does_not(guarded: TestClient, headers: Any) -> None:
    for path in ("/v1/models", "/v1/completions", "/nowhere", "/health/"):
        reply = guarded.get(path, headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["type"] == "AuthenticationError"
        assert reply.headers["www-authenticate"] == "Bearer"


def test_metrics_may_need_a_key(engine: FakeEngine) -> None:
    app = create_app(engine, ["tiny"], api_keys=["secret"], metrics_need_key=True)
    client = TestClient(app)
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/ready").status_code == 200


def test_every_other_route_needs_a_key(engine: FakeEngine) -> None:
    app = create_app(engine, ["tiny"], api_keys=["secret"], admin_keys=["admin"])
    client = TestClient(app)
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    opened = {path for path in paths if client.get(path).status_code != 401}
    page = {"/", "/static/{name}"}
    assert opened == {"/health", "/ping", "/ready", "/version", "/metrics"} | page
    assert client.get("/nowhere").status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/metrics"])
def test_probes_need_no_key(guarded: TestClient, path: str) -> None:
    assert guarded.get(path).status_code == 200


def test_without_keys_any_admits(client: TestClient) -> None:
    headers = {"Authorization": "Bearer whatever"}
    assert client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"]
)
def test_a_model_that_generates_text_says_how_to_get_vectors(client: TestClient, path: str) -> None:
    reply = client.post(path, json={"input": "a"})
    assert reply.status_code == 400
    assert "--runner pooling" in reply.json()["error"]["message"]


def test_replies_carry_the_clients_request_id_or_one_of_ours(client: TestClient) -> None:
    for path, status in (("/v1/models", 200), ("/nowhere", 404)):
        reply = client.get(path, headers={"X-Request-Id": "mine-1"})
        assert (reply.status_code, reply.headers["x-request-id"]) == (status, "mine-1")
    ours = [client.get("/v1/models").headers["x-request-id"] for _ in range(2)]
    assert ours[0] != ours[1]
    long = client.get("/v1/models", headers={"X-Request-Id": "x" * 1000}).headers["x-request-id"]
    assert len(long) == 256


PREFLIGHT = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


def test_pages_of_other_sites_may_ask(guarded: TestClient) -> None:
    reply = guarded.options("/v1/completions", headers=PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "*"
    reply = guarded.get("/v1/models", headers={"Origin": "https://page.example"})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (401, "*")


def test_unless_they_are_not_listed(engine: FakeEngine) -> None:
    app = create_app(engine, ["tiny"], allowed_origins=["https://ours.example"])
    assert TestClient(app).options("/v1/completions", headers=PREFLIGHT).status_code == 400
