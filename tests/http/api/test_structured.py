"""The fields that say what form the output must have."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.runtime.structured_outputs import StructuredOutputsParams
from tests.http.fakes import FakeEngine

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
OLDER: dict[str, Any] = {
    "structures": [{"begin": "a", "schema": {}, "end": "b"}],
    "triggers": ["a"],
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "Hi"}

Wish = StructuredOutputsParams
WISHES: list[tuple[dict[str, Any], Wish | None]] = [
    ({}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Wish(json_object=True)),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Wish(json=SCHEMA)),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        Wish(json=SCHEMA),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Wish(json=SCHEMA)),
    ({"structured_outputs": {"json": "{}"}}, Wish(json="{}")),
    ({"structured_outputs": {"regex": "a+"}}, Wish(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Wish(choice=["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Wish(grammar='start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Wish(json_object=True)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Wish(json=SCHEMA, disable_any_whitespace=True),
    ),
    ({"response_format": {"type": "structural_tag", **OLDER}}, Wish(structural_tag=OLDER)),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        Wish(structural_tag={"format": {"type": "any_text"}}),
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, Wish(structural_tag="{}")),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        Wish(json=SCHEMA, disable_additional_properties=True),
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " ?"},
        Wish(json_object=True, whitespace_pattern=" ?"),
    ),
    ({"guided_json": SCHEMA}, Wish(json=SCHEMA)),
    ({"guided_json": "{}"}, Wish(json="{}")),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        Wish(json=SCHEMA, whitespace_pattern=" ?"),
    ),
    ({"guided_regex": "a+"}, Wish(regex="a+")),
    ({"guided_choice": ["a", "b"]}, Wish(choice=["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, Wish(grammar='start: "a"')),
]


@pytest.mark.parametrize(("fields", "wish"), WISHES)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_gets(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], wish: Wish | None, stream: bool
) -> None:
    for route, body in (("chat/completions", CHAT), ("completions", COMPLETION)):
        reply = client.post(f"/v1/{route}", json=body | fields | {"stream": stream})
        assert reply.status_code == 200, reply.text
        assert engine.seen[-1].params.structured_outputs == wish
    if wish is not None and isinstance(wish.json, dict):
        assert list(wish.json["properties"]) == ["b", "a"]  # the order of the output


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "got 'xml'"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
            "object",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "got none"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs",
            "json and regex",
        ),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "str"),
        ({"guided_choice": []}, "guided_choice", "guided_choice: choice must be a list"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
        (
            {"guided_regex": "a", "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "needs guided_json",
        ),
        (
            {"structured_outputs": {"json": {}}, "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "needs guided_json",
        ),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "got none"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs",
            "is about JSON",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided_regex",
            "only one",
        ),
    ],
)
def test_refusals(client: TestClient, fields: dict[str, Any], param: str, reason: str) -> None:
    reply = client.post("/v1/chat/completions", json=CHAT | fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]
