"""Completions: prompts in all their forms, echo, log-probabilities, streams."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.http.fakes import FakeEngine, events


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/completions", json={"prompt": "ab"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    reply = client.post("/v1/completions", json={"prompt": "ab", "stream": True} | body)
    assert reply.status_code == 200, reply.text
    return events(reply.text)


def refused_param(client: TestClient, **body: Any) -> str:
    reply = client.post("/v1/completions", json={"prompt": "ab"} | body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["param"]


def test_a_whole_reply(client: TestClient) -> None:
    reply = complete(client)
    assert reply.pop("id").startswith("cmpl-")
    assert reply.pop("created") > 0
    assert reply.pop("system_fingerprint").startswith("paged-")
    assert reply == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "Hello!",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[0, 97, 98]]),
        (["a", "b"], [[0, 97], [0, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompts_are_texts_or_token_ids(
    client: TestClient, engine: FakeEngine, prompt: Any, expected: Any
) -> None:
    reply = complete(client, prompt=prompt)
    assert [seen.prompt for seen in engine.seen] == expected
    assert len({seen.request_id for seen in engine.seen}) == len(expected)
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [1, [1]], [-1], [256], [10**30], "x" * 99])
def test_prompts_that_are_refused(client: TestClient, prompt: Any) -> None:
    assert refused_param(client, prompt=prompt) == "prompt"


def test_long_texts_do_not_hold_up_others(client: TestClient, engine: FakeEngine) -> None:
    """They are tokenised outside the event loop's thread."""
    engine.max_model_len = 30_000
    for length in (9_999, 10_000):
        complete(client, prompt="x" * length, max_tokens=1)
    assert engine.tokenizer
    short, long = engine.tokenizer.threads
    assert short == engine.seen[0].thread
    assert long != engine.seen[0].thread


def test_what_cannot_fit_is_not_even_tokenised(client: TestClient, engine: FakeEngine) -> None:
    longest = 256 * engine.max_model_len
    assert refused_param(client, prompt=["a", "x" * (longest + 1)]) == "input_tokens"
    assert engine.tokenizer
    assert len(engine.tokenizer.threads) == 1, "only the short one was"
    assert refused_param(client, prompt="x" * longest) == "prompt", "the engine's own word"


def test_special_tokens_can_be_left_out(client: TestClient, engine: FakeEngine) -> None:
    complete(client, add_special_tokens=False)
    assert engine.seen[0].prompt == [97, 98]


def test_choices_are_numbered_by_prompt_then_sequence(client: TestClient) -> None:
    reply = complete(client, prompt=["a", "b"], n=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 4
    assert reply["usage"]["completion_tokens"] == 24


def test_sixteen_tokens_unless_told_otherwise(client: TestClient, engine: FakeEngine) -> None:
    engine.answer = "x" * 50
    assert complete(client)["usage"]["completion_tokens"] == 16
    assert complete(client, max_tokens=20)["usage"]["completion_tokens"] == 20


def test_log_probabilities(client: TestClient) -> None:
    """The chosen token is always a candidate, so there is one more than asked for."""
    logprobs = complete(client, logprobs=1, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs == {
        "text_offset": [0, 1],
        "token_logprobs": [-3.0, -3.0],
        "tokens": ["H", "e"],
        "top_logprobs": [{"I": -1.0, "H": -3.0}, {"f": -1.0, "e": -3.0}],
    }


def test_echo_puts_the_prompt_first(client: TestClient) -> None:
    choice = complete(client, echo=True, logprobs=0, max_tokens=1)["choices"][0]
    assert choice["text"] == "abH"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [None, -3.0, -3.0, -3.0],
        "tokens": ["\x00", "a", "b", "H"],
        "top_logprobs": [None, {"a": -3.0}, {"b": -3.0}, {"H": -3.0}],
    }
    assert complete(client, prompt=[97, 98], echo=True)["choices"][0]["text"] == "abHello!"


def test_scoring_a_prompt_makes_no_token(client: TestClient) -> None:
    """What evaluation harnesses ask for: echo, max_tokens 0 and logprobs."""
    reply = complete(client, prompt=[97, 98], echo=True, max_tokens=0, logprobs=1)
    [choice] = reply["choices"]
    assert choice["text"] == "ab"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0]
    assert reply["usage"]["completion_tokens"] == 0
    assert refused_param(client, max_tokens=0) == "max_tokens"


def test_prompt_log_probabilities_are_by_token_id(client: TestClient) -> None:
    [choice] = complete(client, prompt_logprobs=0)["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {"97": {"logprob": -3.0, "rank": 3, "decoded_token": "a"}},
        {"98": {"logprob": -3.0, "rank": 3, "decoded_token": "b"}},
    ]
    assert refused_param(client, prompt_logprobs=0, stream=True) == "prompt_logprobs"


def test_a_stream_gives_the_same_as_the_whole(client: TestClient) -> None:
    wanted = {"prompt": ["ab", "c"], "n": 2, "echo": True, "logprobs": 2}
    whole = complete(client, **wanted)["choices"]
    chunks = [chunk["choices"][0] for chunk in stream(client, **wanted)]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert [chunk["finish_reason"] for chunk in own] == [None] * 5 + ["stop"]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in own for value in chunk["logprobs"][name]] == values


def test_prompts_stream_interleaved(client: TestClient, engine: FakeEngine) -> None:
    engine.pause = 0.01
    indices = [chunk["choices"][0]["index"] for chunk in stream(client, prompt=["a", "b"])]
    assert sorted(indices[:2]) == [0, 1]


def test_stream_usage(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6, 6]
    assert chunks[-1]["choices"] == []
    assert "usage" not in stream(client)[0]


def test_one_bad_prompt_refuses_them_all(client: TestClient, engine: FakeEngine) -> None:
    engine.pause = 0.01
    assert refused_param(client, prompt=["a", "x" * 99]) == "prompt"
    assert not engine.running


def test_token_ids_on_demand(client: TestClient) -> None:
    [choice] = complete(client, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == [0, 97, 98]
    assert bytes(choice["token_ids"]) == b"Hello!"
    first, *rest = stream(client, return_token_ids=True)
    assert first["choices"][0]["prompt_token_ids"] == [0, 97, 98]
    assert "prompt_token_ids" not in rest[0]["choices"][0]


def test_a_server_without_tokenizer_takes_token_ids_alone(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.tokenizer = None
    assert complete(client, prompt=[97])["choices"]
    assert refused_param(client, prompt="a") == "prompt"
    reply = client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}
    )
    assert reply.json()["error"]["param"] == "messages"
