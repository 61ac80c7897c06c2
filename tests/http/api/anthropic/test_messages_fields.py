"""What a request for a message may hold, what the engine gets of it, and what is refused."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.http.api.anthropic.protocol import MESSAGES_NEUTRAL
from tests.http.fakes import FakeEngine, client_of

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=500)


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return client_of(engine)


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200} | fields


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    reply = client.post("/v1/messages", json=body(**fields))
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(client: TestClient, **fields: Any) -> str:
    """What is said."""
    reply = client.post("/v1/messages", json=body(**fields))
    assert reply.status_code == 400, reply.text
    error = reply.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    return error["error"]["message"]


def text(*parts: str) -> list[dict[str, Any]]:
    cached = {"cache_control": {"type": "ephemeral"}}
    return [{"type": "text", "text": part} | cached for part in parts]


def test_messages_of_all_kinds(client: TestClient, engine: FakeEngine) -> None:
    def result(**fields: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": "t1"} | fields

    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    ask(
        client,
        system=text("Be", "kind."),
        messages=[
            {"role": "user", "content": text("a", "b")},
            {"role": "assistant", "content": [thought, *text("c", "d"), call]},
            {
                "role": "user",
                "content": [
                    result(content="e"),
                    result(content=text("f", "g")),
                    result(content="h", is_error=True),
                    result(),
                    *text("i"),
                ],
            },
            {"role": "system", "content": "j"},
            {"role": "assistant", "content": "k"},
            {"role": "user", "content": "l"},
        ],
    )
    assert engine.seen[0].text.split("|") == [
        "system:Be\nkind.",
        "user:a\nb",
        "assistant:cd",
        *("tool:e", "tool:f\ng", "tool:Error: h", "tool:"),
        *("user:i", "system:j", "assistant:k", "user:l", "assistant:"),
    ]


def test_the_last_message_of_the_assistant_is_continued(
    client: TestClient, engine: FakeEngine
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    reply = ask(client, messages=messages)
    assert engine.seen[0].text == "user:Hi|assistant:Well,"
    assert reply["content"][0]["text"] == "Hello!"


def test_what_the_engine_gets(client: TestClient, engine: FakeEngine) -> None:
    sampling: dict[str, Any] = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 3,
    }
    ask(client, **sampling, stop_sequences=["x"], priority=5, cache_salt="s")
    [seen] = engine.seen
    assert {name: getattr(seen.params, name) for name in sampling} == sampling
    assert (seen.priority, seen.cache_salt, seen.params.stop) == (5, "s", ["x"])


def test_choices_of_tools(client: TestClient, engine: FakeEngine) -> None:
    def kinds(**fields: Any) -> list[str]:
        return [block["type"] for block in ask(client, tools=[TOOL], **fields)["content"]]

    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine.answer = call * 2
    assert kinds() == kinds(tool_choice={"type": "auto"}) == ["tool_use"] * 2
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert kinds(tool_choice=alone) == ["tool_use"]
    assert kinds(tool_choice={"type": "none"}) == ["text"]
    engine.answer = '[{"name": "f", "parameters": {}}]'
    assert kinds(tool_choice={"type": "any"}) == ["tool_use"]
    engine.answer = '{"a": 1}'
    reply = ask(client, tools=[TOOL], tool_choice={"type": "tool", "name": "f"})
    assert reply["stop_reason"] == "tool_use"
    assert reply["content"][0]["input"] == {"a": 1}
    cut = ask(client, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}, max_tokens=3)
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][0]["input"] == {}


def test_thinking(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = "<think>Hm.</think>Hi!"

    def kinds(**fields: Any) -> list[str]:
        return [block["type"] for block in ask(client, **fields)["content"]]

    assert kinds() == kinds(thinking={"type": "adaptive"}) == ["thinking", "text"]
    assert kinds(thinking={"type": "enabled", "budget_tokens": 50}) == ["thinking", "text"]
    assert kinds(thinking={"type": "enabled", "display": "omitted"}) == ["text"]
    assert kinds(thinking={"type": "disabled"}) == ["text"]
    told = [seen.text.partition("user:")[0] for seen in engine.seen]
    on, off = (f"enable_thinking={state}|thinking={state}|" for state in (True, False))
    assert told == ["", "", on, on, off]


def test_the_template_is_told_of_effort(client: TestClient, engine: FakeEngine) -> None:
    ask(client, output_config={"effort": "low"}, chat_template_kwargs={"a": 1})
    assert engine.seen[0].text.startswith("reasoning_effort=low|a=1|")


@pytest.mark.parametrize("name", sorted(MESSAGES_NEUTRAL))
def test_what_is_not_carried_out_is_refused_unless_neutral(client: TestClient, name: str) -> None:
    for value in (None, *MESSAGES_NEUTRAL[name]):
        ask(client, **{name: value})
    assert refused(client, **{name: {"id": "x"}}) == f"{name} is not supported"


def message(role: str = "user", **block: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        (message(type="image", source={}), "messages[0].content[0].type"),
        (message(type="text"), "messages[0].content[0].text"),
        (message(type="tool_result"), "messages[0].content[0].tool_use_id"),
        (message(type="tool_result", tool_use_id="a", content=[{"type": "image"}]), "messages[0]"),
        (message("assistant", type="tool_use", id="a", name="f"), "messages[0].content[0].input"),
        (message("assistant", type="thinking"), "messages[0].content[0].thinking"),
        (message("assistant", type="redacted_thinking", data="a"), "messages[0].content[0].type"),
        (message("assistant", type="tool_use", id="a", name="f", input={}), "messages must not"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names 'g'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "display": "some"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"stop_sequences": [""]}, "stop_sequences must not"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences may hold 64"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_values_that_are_refused(client: TestClient, fields: dict[str, Any], name: str) -> None:
    assert refused(client, **fields).startswith(name)


def test_values_that_ask_for_nothing(client: TestClient) -> None:
    cached = {"type": "ephemeral"}
    ask(client, tools=[], metadata={"user_id": "a"}, service_tier="auto", cache_control=cached)


def test_errors_have_their_shape_on_these_paths_alone(client: TestClient) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/nothing"):
        assert client.put(path).json()["type"] == "error"
    missing = client.post("/v1/messages/nothing").json()
    assert missing["error"]["type"] == "not_found_error"
    assert "type" not in client.post("/v1/messageses").json()
    large = client.post("/v1/messages", json=body(system="x" * 2**25))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
