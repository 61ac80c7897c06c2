"""Whatever a model writes and wherever it is cut: streams are well-formed and say what replies say.

All three ways to chat are asked for the same answers, which mix text, reasoning and calls, whole,
broken and cut off after any token.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from paged.http.api.answers import AnswerFormat
from paged.http.app import create_app
from tests.http.fakes import FakeEngine

Events = list[dict[str, Any]]
Parts = list[tuple[str, ...]]
"""What an answer consists of: the kind of each part, a call's name, and its text."""

_CALL = '{"name": "f", "arguments": {"a": [1, "\\ud800", 12345678901234567890]}}'
_PIECES = [
    *("Hm", " ", "\n", "é", "{", "}", "[", "]", ",", "<", "<tool", '"', "{}", '{"a": 1e400}'),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", f"<tool_call>{_CALL}</tool_call>"),
    *(_CALL, f"[{_CALL}]", '{"name": "g", "parameters": {}}', '{"name": "", "arguments": {}}'),
    *("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|call|>"),
    f"<|channel|>commentary to=functions.f<|message|>{_CALL}",
]
_NAMED = ["{}", '{"a": "\\ud83d", "b": 1}', '{"a": [' + "[" * 1500]
_FORMATS = {
    "hermes": AnswerFormat("hermes", "qwen3", auto=True),
    "llama3_json": AnswerFormat("llama3_json", "deepseek_r1", auto=True),
    "openai": AnswerFormat("openai", "openai_gptoss", auto=True),
}
_CHOICES = ["auto", "none", "required", "named"]


def sent(text: str) -> Events:
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def chat_parts(message: dict[str, Any]) -> Parts:
    calls = [("call", call["function"]["name"]) for call in message["tool_calls"]]
    arguments = [("arguments", call["function"]["arguments"]) for call in message["tool_calls"]]
    said = ("reasoning", message.get("reasoning") or ""), ("text", message["content"] or "")
    return [*said, *calls, *arguments]


def of_chat(events: Events) -> tuple[Parts, Any]:
    message: dict[str, Any] = {"reasoning": "", "content": "", "tool_calls": []}
    *chunks, last = events
    assert [bool(chunk["choices"][0]["finish_reason"]) for chunk in chunks][:-1].count(True) == 0
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("reasoning", "content"):
            message[name] += delta.get(name) or ""
        for piece in delta.get("tool_calls") or ():
            if "id" in piece:
                message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            assert piece["index"] == len(message["tool_calls"]) - 1
            for name, text in piece["function"].items():
                message["tool_calls"][-1]["function"][name] += text
    return chat_parts(message), (chunks[-1]["choices"][0]["finish_reason"], last["usage"])


def ask_chat(client: TestClient, choice: str, cut: int) -> None:
    function = {"type": "function", "function": {"name": "f"}}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": cut,
        "tools": [function, {"type": "function", "function": {"name": "g"}}],
        "tool_choice": function if choice == "named" else choice,
    }
    whole = client.post("/v1/chat/completions", json=body).json()
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    parts, end = of_chat(sent(client.post("/v1/chat/completions", json=streamed).text))
    [reply] = whole["choices"]
    assert parts == chat_parts(reply["message"])
    assert end == (reply["finish_reason"], whole["usage"])


def item_parts(items: Events) -> Parts:
    return [
        (item["type"], item["status"], item["name"], item["arguments"])
        if item["type"] == "function_call"
        else (item["type"], item["status"], item["content"][0]["text"])
        for item in items
    ]


def of_response(events: Events) -> tuple[Events, dict[str, Any]]:
    """Its items as their events tell them, and the response that it ends with."""
    created, begun, *events, last = events
    assert [created["type"], begun["type"]] == ["response.created", "response.in_progress"]
    items: Events = []
    while events:
        size = 1 + [event["type"] for event in events].index("response.output_item.done")
        (added, *inner, done), events = events[:size], events[size:]
        assert added["type"] == "response.output_item.added"
        is_call = added["item"]["type"] == "function_call"
        if not is_call:
            part, *inner, part_done = inner
            assert part["type"] == "response.content_part.added"
            assert part_done["type"] == "response.content_part.done"
        *deltas, text_done = inner
        text = "".join(delta["delta"] for delta in deltas)
        assert text == text_done["arguments" if is_call else "text"]
        assert {event["output_index"] for event in (added, *inner, done)} == {len(items)}
        assert (
            {event["item_id"] for event in inner} == {added["item"]["id"]} == {done["item"]["id"]}
        )
        assert text == item_parts([done["item"]])[0][-1]
        items.append(done["item"])
    return items, last["response"]


def ask_responses(client: TestClient, choice: str, cut: int) -> None:
    function = {"type": "function", "name": "f"}
    body = {
        "input": "a",
        "max_output_tokens": cut,
        "tools": [function, {"type": "function", "name": "g"}],
        "tool_choice": function if choice == "named" else choice,
    }
    whole = client.post("/v1/responses", json=body).json()
    items, final = of_response(
        sent(client.post("/v1/responses", json=body | {"stream": True}).text)
    )
    assert items == final["output"]
    assert item_parts(items) == item_parts(whole["output"])
    assert (final["status"], final["usage"]) == (whole["status"], whole["usage"])
    if choice != "named":  # whose arguments are cut with the answer
        for response in (whole, final):
            more = {"input": "b", "previous_response_id": response["id"]}
            assert client.post("/v1/responses", json=more).status_code == 200


def block_parts(blocks: Events) -> Parts:
    kinds = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [
        (block["type"], block.get("name", ""), json.dumps(block[kinds[block["type"]]]))
        for block in blocks
    ]


def of_message(events: Events) -> tuple[Events, dict[str, Any]]:
    """Its blocks, and what is told of its end."""
    start, ping, *events, end, stop = events
    assert [event["type"] for event in (start, ping, end, stop)] == [
        *("message_start", "ping", "message_delta", "message_stop")
    ]
    blocks: Events = []
    while events:
        size = 1 + [event["type"] for event in events].index("content_block_stop")
        (begun, *deltas, stopped), events = events[:size], events[size:]
        assert begun["type"] == "content_block_start"
        assert {event["index"] for event in (begun, *deltas, stopped)} == {len(blocks)}
        pieces = [delta["delta"] for delta in deltas]
        text = "".join(piece[set(piece).difference(("type",)).pop()] for piece in pieces)
        block = begun["content_block"]
        if block["type"] == "tool_use":
            blocks.append(block | {"input": _object(text)})
        else:
            blocks.append(block | {block["type"]: text})
    return blocks, end


def _object(text: str) -> Any:
    try:
        return json.loads(text.replace(r"\ud83d", r"\ufffd").replace(r"\ud800", r"\ufffd"))
    except (ValueError, RecursionError):  # cut
        return {}


def ask_messages(client: TestClient, choice: str, cut: int) -> None:
    named = {"type": "tool", "name": "f"}
    kinds = {"required": "any"}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": cut,
        "tools": [{"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}}],
        "tool_choice": named if choice == "named" else {"type": kinds.get(choice, choice)},
    }
    whole = client.post("/v1/messages", json=body).json()
    blocks, end = of_message(sent(client.post("/v1/messages", json=body | {"stream": True}).text))
    assert block_parts(blocks) == block_parts(whole["content"])
    assert end["delta"]["stop_reason"] == whole["stop_reason"]
    assert end["usage"] == whole["usage"]


def check(ask: Callable[[TestClient, str, int], None], num_examples: int) -> None:
    clients: dict[str, tuple[FakeEngine, TestClient]] = {}
    for name, answers in _FORMATS.items():
        engine = FakeEngine(max_model_len=10_000)
        clients[name] = engine, TestClient(create_app(engine, ["tiny"], answers=answers))

    @settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(sorted(_FORMATS)),
        st.sampled_from(_CHOICES),
        st.lists(st.sampled_from(_PIECES), min_size=1, max_size=6).map("".join),
        st.sampled_from(_NAMED),
        st.integers(1, 40) | st.just(2000),
    )
    def agrees(name: str, choice: str, answer: str, arguments: str, cut: int) -> None:
        engine, client = clients[name]
        engine.answer = arguments if choice == "named" else answer
        ask(client, choice, cut)

    agrees()


@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
def test_streams_and_replies(ask: Callable[[TestClient, str, int], None]) -> None:
    check(ask, 100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
def test_many_more(ask: Callable[[TestClient, str, int], None]) -> None:
    check(ask, 5000)
