"""The description of the API is that of the protocol, and the page leads nowhere else."""

from typing import Any

from starlette.testclient import TestClient

from paged.http.api.protocol import ChatRequest
from paged.http.app import create_app
from tests.runtime.pooling.pooling_fakes import pooling_engine


def described(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def test_every_route_is_described(client: TestClient) -> None:
    description = described(client)
    paths = description["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/health", "/v1/models/{name}"} <= {*paths}
    assert {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens"} <= {*paths}
    stored = paths["/v1/responses/{response_id}"]
    assert {verb: each["summary"] for verb, each in stored.items()} == {
        "delete": "Forget a stored response.",
        "get": "A stored response as it is now.",
    }
    assert all(each["summary"] for verbs in paths.values() for each in verbs.values())
    fields = description["components"]["schemas"]["ChatRequest"]["properties"]
    assert [*fields] == [*ChatRequest.__struct_fields__]


def test_streams_are_described(client: TestClient) -> None:
    paths = described(client)["paths"]
    streams = [path for path in paths if "text/event-stream" in str(paths[path])]
    assert {*streams} == {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    }


def test_what_no_model_can_do_is_not_described(client: TestClient) -> None:
    assert not {"/v1/embeddings", "/score", "/rerank"} & {*described(client)["paths"]}
    engine = pooling_engine()
    paths = described(TestClient(create_app(engine, ["tiny"])))["paths"]
    engine.shutdown()
    assert {"/v1/embeddings", "/score", "/rerank", "/invocations"} <= {*paths}
    assert not any("responses" in path or "messages" in path for path in paths)


def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return {ref for each in value for ref in references(each)}
    if isinstance(value, dict):
        inner = {ref for each in value.values() for ref in references(each)}
        return inner | ({value["$ref"]} if isinstance(value.get("$ref"), str) else set())
    return set()


def test_references_lead_somewhere(client: TestClient) -> None:
    description = described(client)
    known = {f"#/components/schemas/{name}" for name in description["components"]["schemas"]}
    assert references(description) <= known


def test_the_page_has_no_link_to_other_places(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "POST /v1/chat/completions" in page.text
    assert "http:" not in page.text
    assert "https:" not in page.text
