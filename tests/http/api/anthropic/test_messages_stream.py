"""The order of a message's events, which clients rely on."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.http.fakes import FakeEngine, client_of, named_events

TOOL = {"name": "weather", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=2000)


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return client_of(engine)


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    """The events."""
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 1000, "stream": True} | body
    reply = client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named_events(reply.text)


def test_text(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = "Hey"
    start, ping, *events = stream(client)
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"] == {
        "input_tokens": 17,
        "output_tokens": 0,
        "cache_read_input_tokens": 1,
        "cache_creation_input_tokens": 0,
    }
    assert ping == {"type": "ping"}
    text = {"type": "text", "text": "", "citations": None}
    assert events == [
        {"type": "content_block_start", "index": 0, "content_block": text},
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": letter},
            }
            for letter in "Hey"
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": start["message"]["usage"] | {"output_tokens": 3},
        },
        {"type": "message_stop"},
    ]


def test_thinking_then_text_then_calls(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = f"<think>Hm.</think>Let me see.{CALL}{CALL}"
    events = stream(client, tools=[TOOL])
    starts = [event["content_block"] for event in events if "content_block" in event]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    for at, kind in enumerate(["thinking", "text", "input_json", "input_json"]):
        own = [event for event in events if event.get("index") == at]
        assert own[0]["type"] == "content_block_start"
        assert {event["delta"]["type"] for event in own[1:-1]} == {f"{kind}_delta"}
        assert own[-1]["type"] == "content_block_stop"
    indices = [event["index"] for event in events if "index" in event]
    assert indices == sorted(indices)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_why_an_answer_ends(client: TestClient, engine: FakeEngine) -> None:
    def ends(**body: Any) -> tuple[str, str | None]:
        delta = stream(client, **body)[-2]["delta"]
        return delta["stop_reason"], delta["stop_sequence"]

    assert ends(max_tokens=3) == ("max_tokens", None)
    engine.max_model_len = 22
    assert ends() == ("model_context_window_exceeded", None)
    assert engine.seen[-1].params.max_tokens == 4
    engine.max_model_len, engine.stop_reason = 2000, "o!"
    assert ends(stop_sequences=["o!"]) == ("stop_sequence", "o!")


def test_a_failure_midway_is_the_last_event(client: TestClient, engine: FakeEngine) -> None:
    engine.fails_after = 2
    last = stream(client)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_an_answer_that_is_aborted_has_failed(client: TestClient, engine: FakeEngine) -> None:
    engine.ends_with = "abort"
    assert stream(client)[-1]["type"] == "error"
