"""The order of a chat stream's chunks, which clients rely on."""

from typing import Any

from starlette.testclient import TestClient

from tests.http.fakes import FakeEngine, events


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True} | body
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(reply.text)


def test_role_then_text_then_reason(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = "Hey"
    chunks = stream(client)
    assert [chunk["choices"] for chunk in chunks] == [
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        [{"index": 0, "delta": {"content": "H"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "e"}, "logprobs": None, "finish_reason": None}],
        [
            {
                "index": 0,
                "delta": {"content": "y"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    ]


def test_chunks_share_their_head(client: TestClient) -> None:
    heads = [{**chunk, "choices": None} for chunk in stream(client)]
    assert heads == [heads[0]] * 7
    assert heads[0]["object"] == "chat.completion.chunk"
    assert heads[0].keys() >= {"id", "created", "model", "system_fingerprint"}
    assert "usage" not in heads[0]


def test_usage_comes_last_and_only_if_asked_for(client: TestClient) -> None:
    *chunks, last = stream(client, stream_options={"include_usage": True})
    assert not any("usage" in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 18,
        "completion_tokens": 6,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_usage_can_come_with_every_chunk(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = "abc"
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3]
    alone = stream(client, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in alone] == [0, 1, 2, 3]


def test_each_of_several_answers_begins_with_its_role(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.answer = "ab"
    choices = [chunk["choices"][0] for chunk in stream(client, n=2)]
    for index in range(2):
        own = [choice["delta"] for choice in choices if choice["index"] == index]
        assert own == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]


def test_log_probabilities_come_with_their_tokens(client: TestClient) -> None:
    _, *chunks = stream(client, logprobs=True, top_logprobs=1)
    tokens = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks]
    assert [entry["token"] for [entry] in tokens] == list("Hello!")


def test_token_ids_on_demand(client: TestClient) -> None:
    first, *chunks = stream(client, return_token_ids=True)
    assert bytes(first["prompt_token_ids"]) == b"user:Hi|assistant:"
    assert bytes(chunk["choices"][0]["token_ids"][0] for chunk in chunks) == b"Hello!"


def test_a_failure_midway_is_the_last_event(client: TestClient, engine: FakeEngine) -> None:
    engine.fails_after = 2
    *chunks, last = stream(client)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "H", "e"]
    assert last["error"]["code"] == 500
    assert last["error"]["type"] == "InternalServerError"


def test_a_request_that_cannot_run_is_a_status_not_an_event(
    client: TestClient, engine: FakeEngine
) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 99}], "stream": True}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "BadRequestError"
