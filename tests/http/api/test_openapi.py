"""The description of the API is that of the protocol, and the page leads nowhere else."""

from typing import Any

from starlette.testclient import TestClient

from paged.http.api.protocol import ChatRequest


def described(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def test_every_route_is_described(client: TestClient) -> None:
    description = described(client)
    paths = description["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/health", "/v1/models/{name}"} <= {*paths}
    assert {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens"} <= {*paths}
    assert [*paths["/v1/responses/{response_id}"]] == ["get", "delete"]
    assert all(each["summary"] for verbs in paths.values() for each in verbs.values())
    fields = description["components"]["schemas"]["ChatRequest"]["properties"]
    assert [*fields] == [*ChatRequest.__struct_fields__]


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
