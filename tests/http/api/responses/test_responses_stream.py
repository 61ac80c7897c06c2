"""The order of a response's events, which clients rely on."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.http.fakes import FakeEngine, client_of, named_events

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=2000)


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return client_of(engine)


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    """The events, which must be numbered in their order."""
    reply = client.post("/v1/responses", json={"input": "Hi", "stream": True} | body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = named_events(reply.text)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def types(events: list[dict[str, Any]]) -> list[str]:
    """Their types, neighbours of one type as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


TEXT = [
    *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
    *("content_part.done", "output_item.done"),
]
REASONING = [name.replace("output_text", "reasoning_text") for name in TEXT]
FUNCTION_CALL = [
    *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
    "output_item.done",
]


def test_text(client: TestClient) -> None:
    events = stream(client)
    assert types(events) == ["created", "in_progress", *TEXT, "completed"]
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert deltas == list("Hello!")
    created, *_, done, completed = events
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert completed["response"]["output"] == [done["item"]]
    assert completed["response"]["usage"]["output_tokens"] == 6
    assert completed["response"]["id"] == created["response"]["id"]


def test_reasoning_then_text_then_calls(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = f"<think>Hm.</think>Let me see.{CALL}{CALL}"
    events = stream(client, tools=[TOOL])
    items = [*REASONING, *TEXT, *FUNCTION_CALL, *FUNCTION_CALL]
    assert types(events) == ["created", "in_progress", *items, "completed"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert {event["item"]["status"] for event in added} == {"in_progress"}
    output = events[-1]["response"]["output"]
    assert [item["id"] for item in output] == [event["item"]["id"] for event in added]
    assert [item["status"] for item in output] == ["completed"] * 4
    for event in events[2:-1]:
        item_id = event.get("item_id") or event["item"]["id"]
        assert item_id == output[event["output_index"]]["id"]


def test_a_stream_says_the_same_as_a_reply(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = f"<think>Hm.</think>Let me see.{CALL}"
    body = {"input": "Hi", "tools": [TOOL]}
    whole = client.post("/v1/responses", json=body).json()
    streamed = stream(client, tools=[TOOL])[-1]["response"]
    for reply in (whole, streamed):
        for item in reply["output"]:
            del item["id"]
            item.pop("call_id", None)
    assert whole["output"] == streamed["output"]
    assert whole["usage"] == streamed["usage"]


def test_a_named_functions_arguments_come_as_they_are_made(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.answer = '{"city": 1}'
    choice = {"type": "function", "name": "weather"}
    events = stream(client, tools=[TOOL], tool_choice=choice)
    assert types(events) == ["created", "in_progress", *FUNCTION_CALL, "completed"]
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert deltas == list(engine.answer)
    [done] = [event for event in events if event["type"].endswith("arguments.done")]
    assert (done["name"], done["arguments"]) == ("weather", engine.answer)


def test_an_answer_that_is_cut_is_incomplete(client: TestClient) -> None:
    *_, done, last = stream(client, max_output_tokens=3)
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert done["item"]["status"] == "incomplete"


def test_a_failure_midway_is_the_last_event(client: TestClient, engine: FakeEngine) -> None:
    engine.fails_after = 2
    last = stream(client)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    stored = client.get(f"/v1/responses/{last['response']['id']}").json()
    assert stored == last["response"]


def test_an_answer_that_is_aborted_has_failed(client: TestClient, engine: FakeEngine) -> None:
    engine.ends_with = "abort"
    assert stream(client)[-1]["type"] == "response.failed"


def test_a_request_that_cannot_run_is_a_status_not_an_event(client: TestClient) -> None:
    reply = client.post("/v1/responses", json={"input": "x" * 3000, "stream": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "input"
