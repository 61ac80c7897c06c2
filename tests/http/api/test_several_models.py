"""Several models behind one door: each request reaches the one that it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from paged.http.api.answers import AnswerFormat
from paged.http.app import create_server, create_service
from tests.http.fakes import FakeEngine
from tests.runtime.pooling.pooling_fakes import FakeRunner, pooling_engine

POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.fixture
def engines() -> Iterator[list[Any]]:
    engines: list[Any] = [
        pooling_engine(FakeRunner()),
        FakeEngine(answer="one"),
        FakeEngine(answer="two!", max_model_len=32),
    ]
    yield engines
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def client(engines: list[Any]) -> TestClient:
    names = [("vectors",), ("first", "alias"), ("org/second",)]
    services = [
        create_service(engine, each, number, answers=AnswerFormat(), response_role=each[0])
        for number, (engine, each) in enumerate(zip(engines, names, strict=True))
    ]
    server = create_server(services, max_body_size=200, tells_tokenizer=True)
    return TestClient(server, raise_server_exceptions=False)


def post(client: TestClient, path: str, **body: Any) -> Any:
    reply = client.post(path, json=POSTS.get(path, {}) | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(client: TestClient, path: str, **body: Any) -> tuple[int, str]:
    error = client.post(path, json=POSTS[path] | body).json()["error"]
    return error["code"], error["message"]


def test_every_name_is_listed(client: TestClient) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
        ("vectors", "vectors", 24),
        ("first", "first", 64),
        ("alias", "first", 64),
        ("org/second", "org/second", 32),
    ]
    assert client.get("/v1/models/org/second").json()["id"] == "org/second"


@pytest.mark.parametrize(
    ("asked", "name", "text"),
    [
        ({}, "first", "one"),
        ({"model": ""}, "first", "one"),
        ({"model": "alias"}, "first", "one"),
        ({"model": "org/second"}, "org/second", "two!"),
    ],
)
def test_text_is_by_the_model_that_is_named(
    client: TestClient, asked: dict[str, str], name: str, text: str
) -> None:
    reply = post(client, "/v1/completions", **asked)
    assert (reply["model"], reply["choices"][0]["text"]) == (name, text)
    reply = post(client, "/v1/chat/completions", **asked)
    assert (reply["model"], reply["choices"][0]["message"]["content"]) == (name, text)


@pytest.mark.parametrize("asked", [{}, {"model": "vectors"}])
def test_vectors_are_by_the_one_that_makes_them(client: TestClient, asked: dict[str, str]) -> None:
    for path in ("/v1/embeddings", "/score", "/rerank"):
        assert post(client, path, **asked)["model"] == "vectors"


@pytest.mark.parametrize("path", POSTS)
def test_names_that_are_not_there(client: TestClient, path: str) -> None:
    code, message = refused(client, path, model="gpt-5")
    assert code == 404
    assert message.endswith("server has `vectors`, `first`, `alias`, `org/second`")


def test_invocations_reach_the_model_that_is_named(client: TestClient) -> None:
    for model, texts in (("first", "one"), ("org/second", "two!")):
        for body in ({"prompt": "a"}, POSTS["/v1/chat/completions"]):
            [choice] = post(client, "/invocations", model=model, **body)["choices"]
            said = choice["message"]["content"] if "message" in choice else choice["text"]
            assert said == texts
    assert post(client, "/invocations", input="a", model="vectors")["model"] == "vectors"
    assert post(client, "/invocations", query="a", documents=["b"])["model"] == "vectors"
    reply = client.post("/invocations", json={"input": "a", "model": "first"})
    assert "for embeddings and scores start one" in reply.json()["error"]["message"]


def test_replies_carry_the_role_of_their_model(client: TestClient) -> None:
    for model in ("first", "org/second"):
        [choice] = post(client, "/v1/chat/completions", model=model)["choices"]
        assert choice["message"]["role"] == model


def test_the_tokenizer_told_is_that_of_the_model(client: TestClient) -> None:
    assert client.get("/tokenizer_info?model=first").json()["bos_token"] == "\0"
    assert client.get("/tokenizer_info").json()["bos_token"] != "\0"
    assert client.get("/tokenizer_info?model=nosuch").status_code == 404


def test_the_wrong_kind_of_model(client: TestClient) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        code, message = refused(client, path, model="vectors")
        assert code == 400
        assert "`vectors` gives embeddings or scores and generates no text" in message
        assert message.endswith("or ask `first`, `org/second`")
    for path in ("/v1/embeddings", "/score", "/rerank"):
        code, message = refused(client, path, model="alias")
        assert code == 400
        assert message.startswith("The model `first` was started to generate text")
        assert message.endswith("or ask `vectors`")


def test_tokens_are_those_of_the_model(client: TestClient) -> None:
    counts = {
        name: post(client, "/tokenize", prompt="ab", model=name)["tokens"]
        for name in ("vectors", "alias")
    }
    assert counts == {"vectors": [0, 2, 3, 1], "alias": [0, 97, 98]}
    assert post(client, "/tokenize", prompt="ab")["tokens"] == counts["vectors"]
    assert post(client, "/detokenize", tokens=[97, 98], model="first") == {"prompt": "ab"}


def test_bodies_have_one_limit(client: TestClient) -> None:
    assert refused(client, "/v1/completions", prompt="a" * 200)[0] == 413
    assert refused(client, "/v1/embeddings", input="a" * 200)[0] == 413


def test_metrics_are_of_each_model_in_one_family(client: TestClient) -> None:
    post(client, "/v1/completions", model="org/second")
    post(client, "/v1/embeddings")
    text = client.get("/metrics").text
    types = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(types) == len(set(types))
    samples = {
        (sample.name, sample.labels["model_name"], sample.labels["engine"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith(("vllm:", "paged:"))
    }
    models = [("vectors", "0"), ("first", "1"), ("org/second", "2")]
    for name, values in {
        "vllm:e2e_request_latency_seconds_count": [1, 0, 1],
        "vllm:request_generation_tokens_sum": [0, 0, 4],
        "paged:num_pages": [0, 100, 100],
    }.items():
        assert [samples[name, *model] for model in models] == values


def test_health_says_who_is_dead(client: TestClient, engines: list[Any]) -> None:
    assert client.get("/health").status_code == 200
    engines[2].errored = True
    for path in ("/health", "/ping"):
        reply = client.get(path)
        assert reply.status_code == 503
        assert "The engine of org/second has stopped" in reply.json()["error"]["message"]
    engines[1].errored = True
    assert "The engine of first has stopped" in client.get("/health").json()["error"]["message"]


def test_all_routes_are_described(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert all("refuse" not in str(paths[path]) for path in POSTS)
    assert "vector for each input" in paths["/v1/embeddings"]["post"]["summary"]
