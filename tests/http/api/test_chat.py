"""Chat: what goes to the engine, and what comes back, whole."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.http.fakes import FakeEngine

MESSAGES = [{"role": "user", "content": "Hi"}]
CLOCK = {"type": "function", "function": {"name": "clock"}}


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json={"messages": MESSAGES} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json={"messages": MESSAGES} | body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def test_a_whole_reply(client: TestClient) -> None:
    reply = chat(client)
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("created") > 0
    assert reply.pop("system_fingerprint").startswith("paged-")
    assert reply == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello!",
                    "refusal": None,
                    "tool_calls": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "prompt_logprobs": None,
        "usage": {
            "prompt_tokens": 18,
            "completion_tokens": 6,
            "total_tokens": 24,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_the_template_gets_the_conversation_as_it_likes_to_read_it(
    client: TestClient, engine: FakeEngine
) -> None:
    chat(
        client,
        messages=[
            {"role": "developer", "content": "Be"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
        chat_template_kwargs={"lang": "en"},
    )
    expected = "lang=en|system:Be|user:a\nb|assistant:c|user:d|assistant:"
    assert engine.seen[0].text == expected


def test_special_tokens_are_left_to_the_template(client: TestClient, engine: FakeEngine) -> None:
    chat(client)
    chat(client, add_special_tokens=True)
    assert [seen.prompt[0] == 0 for seen in engine.seen] == [False, True]


def test_the_final_message_can_be_continued(client: TestClient, engine: FakeEngine) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "He"}]
    chat(client, messages=messages, continue_final_message=True)
    chat(client, messages=messages, add_generation_prompt=False)
    assert {seen.text for seen in engine.seen} == {"user:Hi|assistant:He"}
    error = refusal(client, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


def test_tool_messages_reach_the_template(client: TestClient, engine: FakeEngine) -> None:
    function = {"name": "time", "arguments": '{"zone": "UTC"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    chat(client, messages=messages, tools=[CLOCK], tool_choice="none")
    assert engine.seen[0].text == "tools=1|user:Hi|assistant:|tool:noon|assistant:"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "odd"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"chat_template_kwargs": {"refuse": True}}, "messages"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"tools": []}, "tools"),
    ],
)
def test_conversations_that_are_refused(
    client: TestClient, body: dict[str, Any], param: str
) -> None:
    error = refusal(client, **body)
    assert (error["param"], error["type"]) == (param, "BadRequestError")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * 10_000}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 400}]},
        {"messages": [{"role": "user", "content": ""}] * 100},
        {"chat_template_kwargs": {"x": list(range(3000))}},
        {"tools": [{**CLOCK, "x": list(range(3000))}], "tool_choice": "none"},
    ],
)
def test_long_conversations_do_not_hold_up_others(
    client: TestClient, engine: FakeEngine, body: dict[str, Any]
) -> None:
    """They are rendered and tokenised outside the event loop's thread, whatever is long in them."""
    engine.max_model_len = 30_000
    chat(client, max_tokens=1)
    chat(client, max_tokens=1, **body)
    assert engine.tokenizer
    short, long = engine.tokenizer.threads
    assert short == engine.seen[0].thread
    assert long != engine.seen[0].thread


def test_what_cannot_fit_is_not_even_tokenised(client: TestClient, engine: FakeEngine) -> None:
    longest = 256 * engine.max_model_len
    for messages in (
        [{"role": "user", "content": "x" * longest}],
        [{"role": "user", "content": ""}] * (engine.max_model_len + 1),
    ):
        assert refusal(client, messages=messages)["param"] == "input_tokens"
    assert engine.tokenizer
    assert not engine.tokenizer.threads


def test_an_answer_may_fill_the_context_unless_limited(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.answer = "x" * 99
    assert chat(client)["usage"]["total_tokens"] == engine.max_model_len
    limited = chat(client, max_tokens=9, max_completion_tokens=3)
    assert limited["usage"]["completion_tokens"] == 3
    assert limited["choices"][0]["finish_reason"] == "length"


def test_several_answers(client: TestClient) -> None:
    reply = chat(client, n=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"]["prompt_tokens"] == 18
    assert reply["usage"]["completion_tokens"] == 12


def test_log_probabilities(client: TestClient) -> None:
    """Exactly as many candidates as asked for, in UTF-8, and no infinity in the JSON."""
    entry, *_ = chat(client, logprobs=True, top_logprobs=4)["choices"][0]["logprobs"]["content"]
    assert entry == {
        "token": "H",
        "logprob": -3.0,
        "bytes": [72],
        "top_logprobs": [
            {"token": "I", "logprob": -1.0, "bytes": [73]},
            {"token": "J", "logprob": -2.0, "bytes": [74]},
            {"token": "H", "logprob": -3.0, "bytes": [72]},
            {"token": "K", "logprob": -9999.0, "bytes": [75]},
        ],
    }


def test_token_bytes_are_utf8(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = "\xe9"
    [entry] = chat(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert entry["bytes"] == [0xC3, 0xA9]
    assert entry["top_logprobs"] == []


@pytest.mark.parametrize("body", [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}])
def test_candidates_that_cannot_be_had(client: TestClient, body: dict[str, Any]) -> None:
    assert refusal(client, **body)["param"] == "top_logprobs"


def test_prompt_log_probabilities_are_by_token_id(client: TestClient) -> None:
    reply = chat(client, prompt_logprobs=0)
    first, second, *_ = reply["prompt_logprobs"]
    assert first is None
    assert second == {"115": {"logprob": -3.0, "rank": 3, "decoded_token": "s"}}


def test_token_ids_on_demand(client: TestClient) -> None:
    reply = chat(client, return_token_ids=True)
    assert bytes(reply["prompt_token_ids"]) == b"user:Hi|assistant:"
    assert bytes(reply["choices"][0]["token_ids"]) == b"Hello!"
