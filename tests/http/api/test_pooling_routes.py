"""/v1/embeddings, /score and /rerank, over an engine whose vectors are known beforehand."""

import threading
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from starlette.testclient import TestClient

from paged.http.api.fields import POOLING_NEUTRAL
from paged.http.api.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from paged.http.app import create_app
from paged.runtime.pooling.engine import PoolingEngine
from tests.http.api.test_any_body import VALUES, bodies
from tests.http.api.test_disconnect import send
from tests.http.fakes import serving
from tests.http.test_metrics import value
from tests.runtime.pooling.pooling_fakes import FakeRunner, pooling_engine
from tests.runtime.remote import wait_until

SCORES = ("/score", "/v1/score")
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
RERANK = {"query": "a", "documents": ["b", {"text": "zz"}, "c"]}


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[PoolingEngine]:
    engine = pooling_engine(runner)
    yield engine
    engine.shutdown()


@pytest.fixture
def client(engine: PoolingEngine) -> Iterator[TestClient]:
    app = create_app(engine, ["tiny", "other"])
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def classifier() -> Iterator[TestClient]:
    engine = pooling_engine(scores=True)
    with TestClient(create_app(engine, ["tiny"]), raise_server_exceptions=False) as client:
        yield client
    engine.shutdown()


def post(client: TestClient, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(client: TestClient, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [4]),
        (["ab", "c"], [4, 3]),
        ([2, 3], [2]),
        ([[2, 3], [4]], [2, 1]),
    ],
)
def test_inputs_of_every_kind(client: TestClient, given: Any, tokens: list[int]) -> None:
    reply = post(client, "/v1/embeddings", input=given, user="someone")
    assert (reply["object"], reply["model"]) == ("list", "tiny")
    assert reply["id"].startswith("embd-")
    assert [each["index"] for each in reply["data"]] == list(range(len(tokens)))
    assert [each["embedding"][1] for each in reply["data"]] == tokens
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (sum(tokens), sum(tokens))


def test_base64_is_little_endian_float32(client: TestClient) -> None:
    plain = post(client, "/v1/embeddings", input="abc")["data"][0]["embedding"]
    coded = post(client, "/v1/embeddings", input="abc", encoding_format="base64")
    decoded = np.frombuffer(b64decode(coded["data"][0]["embedding"]), "<f4")
    assert decoded.tolist() == plain


def test_inputs_may_be_cut(client: TestClient) -> None:
    reply = post(client, "/v1/embeddings", input="abcdef", truncate_prompt_tokens=4)
    assert reply["usage"]["prompt_tokens"] == 4
    reply = post(client, "/v1/embeddings", input="a" * 99, truncate_prompt_tokens=-1)
    assert reply["usage"]["prompt_tokens"] == 24
    reply = post(client, "/v1/embeddings", input="abcdef", add_special_tokens=False)
    assert reply["usage"]["prompt_tokens"] == 6


def test_vectors_may_be_cut_where_the_model_allows_it(client: TestClient) -> None:
    assert refused(client, "/v1/embeddings", input="a", dimensions=2)["param"] == "dimensions"
    engine = pooling_engine(dimensions=None)
    with TestClient(create_app(engine, ["tiny"])) as able:
        reply = post(able, "/v1/embeddings", input="a", dimensions=2)
        assert reply["data"][0]["embedding"] == pytest.approx([2**-0.5] * 2)
    engine.shutdown()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input"),
        ("/v1/embeddings", {"input": [99]}, "input"),
        ("/v1/embeddings", {"input": [10**30]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a" * 23}, "input_tokens"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "messages": [{}]}, "messages"),
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, None),
        ("/score", {"text_1": [], "text_2": []}, None),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"documents": ["b"]}, "query"),
        ("/rerank", {"query": "a" * 23, "documents": ["b"]}, "input_tokens"),
    ],
)
def test_what_cannot_be_done_is_a_400(
    client: TestClient, path: str, body: Any, param: str | None
) -> None:
    assert refused(client, path, **body)["param"] == param


@pytest.mark.parametrize("path", SCORES)
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")]
)
def test_scores_of_one_with_many_and_of_pairs(
    client: TestClient, path: str, names: tuple[str, str]
) -> None:
    first, second = names
    reply = post(client, path, **{first: "a", second: ["a", "zz"]})
    assert reply["id"].startswith("score-")
    assert [each["index"] for each in reply["data"]] == [0, 1]
    assert [each["object"] for each in reply["data"]] == ["score"] * 2
    same, other = (each["score"] for each in reply["data"])
    assert same == pytest.approx(1)
    assert other < 0.99
    pairs = post(client, path, **{first: ["a", "a"], second: ["a", "zz"]})
    assert [each["score"] for each in pairs["data"]] == [same, other]
    assert reply["usage"]["prompt_tokens"] == 13


@pytest.mark.parametrize("path", RERANKS)
def test_documents_are_ranked(classifier: TestClient, path: str) -> None:
    reply = post(classifier, path, **RERANK)
    assert reply["id"].startswith("rerank-")
    assert [each["index"] for each in reply["results"]] == [1, 2, 0]
    assert [each["document"] for each in reply["results"]] == [
        *({"text": "zz"}, {"text": "c"}, {"text": "b"})
    ]
    scores = [each["relevance_score"] for each in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert reply["usage"]["total_tokens"] == 16


def test_only_the_best_and_only_their_numbers(classifier: TestClient) -> None:
    reply = post(classifier, "/rerank", **RERANK, top_n=2, return_documents=False)
    assert [set(each) for each in reply["results"]] == [{"index", "relevance_score"}] * 2
    assert len(post(classifier, "/rerank", **RERANK, top_n=0)["results"]) == 3


def test_a_classifier_has_no_embeddings(classifier: TestClient) -> None:
    error = refused(classifier, "/v1/embeddings", input="a")
    assert error["type"] == "NotImplementedError"
    assert "no embeddings" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_text_is_generated(client: TestClient, path: str) -> None:
    error = refused(client, path, messages=[], prompt="a")
    assert "generates no text" in error["message"]


def test_the_rest_is_as_for_every_model(client: TestClient) -> None:
    assert client.get("/health").status_code == 200
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny", "other"]
    reply = client.post("/v1/embeddings", json={"input": "a", "model": "gpt"})
    assert reply.status_code == 404
    assert client.post("/v1/embeddings", json={"input": "a", "model": "other"}).is_success


def test_requests_are_counted(client: TestClient) -> None:
    post(client, "/v1/embeddings", input=["ab", "c"])
    refused(client, "/v1/embeddings", input=[])
    assert value(client, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(client, "vllm:request_prompt_tokens_sum") == 7
    assert value(client, "vllm:prompt_tokens_total") == 7
    assert value(client, "vllm:num_requests_running") == 0
    assert value(client, "vllm:e2e_request_latency_seconds_count") == 1


def test_a_dead_engine_says_so() -> None:
    engine = pooling_engine(FakeRunner(fails_at=0))
    with TestClient(create_app(engine, ["tiny"]), raise_server_exceptions=False) as client:
        for _ in range(2):
            reply = client.post("/v1/embeddings", json={"input": "a"})
            assert reply.status_code == 500
            assert "engine has stopped" in reply.json()["error"]["message"]
        assert client.get("/health").status_code == 503
        assert value(client, "vllm:request_success_total", finished_reason="error") == 1
    engine.shutdown()


def test_a_client_that_goes_away_is_not_worked_for(
    engine: PoolingEngine, runner: FakeRunner
) -> None:
    with serving(create_app(engine, ["tiny"])) as url:
        runner.gate.clear()
        first = send(url, "/v1/embeddings", {"input": "a"})
        assert runner.entered.wait(30)
        second = send(url, "/v1/embeddings", {"input": ["b", "c"]})
        wait_until(lambda: engine.stats().num_waiting == 2)
        second.close()
        live = engine._keeper.thread._live
        wait_until(lambda: len(live) == 1)
        runner.gate.set()
        assert first.recv(15) == b"HTTP/1.1 200 OK"
        first.close()
        wait_until(lambda: engine.stats().num_waiting == 0)
    assert sum(len(batch.texts) for batch in runner.batches) == 1
    assert not live


def test_requests_at_the_same_time_are_computed_together(
    client: TestClient, runner: FakeRunner
) -> None:
    runner.gate.clear()
    letters = "abcd"
    replies: dict[str, Any] = {}

    def ask(letter: str) -> None:
        replies[letter] = post(client, "/v1/embeddings", input=letter)["data"][0]["embedding"][0]

    threads = [threading.Thread(target=ask, args=(letter,)) for letter in letters]
    for thread in threads:
        thread.start()
    assert runner.entered.wait(30)
    engine = client.app.state.models.services[0].engine  # type: ignore[attr-defined]
    wait_until(lambda: len(engine._keeper.thread._live) == 4)
    runner.gate.set()
    for thread in threads:
        thread.join(30)
    assert [replies[letter] for letter in letters] == [3, 4, 5, 6]
    assert len(runner.batches) <= 3


def test_the_official_client(engine: PoolingEngine) -> None:
    with (
        serving(create_app(engine, ["tiny"])) as url,
        OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        coded = sdk.embeddings.create(model="tiny", input=["ab", "c"])
        plain = sdk.embeddings.create(model="tiny", input=["ab", "c"], encoding_format="float")
        assert [each.embedding for each in coded.data] == [each.embedding for each in plain.data]
        type(plain).model_validate(plain.model_dump(exclude_unset=True), strict=True)
        assert plain.usage.total_tokens == 7
        with pytest.raises(openai.BadRequestError, match="may not be cut"):
            sdk.embeddings.create(model="tiny", input="a", dimensions=2)


EMBEDDINGS = bodies(
    EmbeddingRequest.__struct_fields__, POOLING_NEUTRAL, input=st.just("a") | VALUES
)
PAIRS = bodies(ScoreRequest.__struct_fields__, POOLING_NEUTRAL, text_1=st.just("a"))
RANKINGS = bodies(
    RerankRequest.__struct_fields__,
    POOLING_NEUTRAL,
    query=st.just("a"),
    documents=st.just(["a", {"text": "b"}]) | VALUES,
)


@pytest.mark.parametrize(
    ("path", "strategy"),
    [("/v1/embeddings", EMBEDDINGS), ("/score", PAIRS), ("/rerank", RANKINGS)],
)
def test_any_body_is_answered_or_refused(client: TestClient, path: str, strategy: Any) -> None:
    @settings(
        max_examples=100,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(strategy)
    def check(body: Any) -> None:
        reply = client.post(path, json=body)
        assert reply.status_code in (200, 400, 404), reply.text

    check()
