"""What a server fills in where requests leave it open."""

from typing import Any

from starlette.testclient import TestClient

from paged.http.api.defaults import RequestDefaults
from paged.http.app import create_app
from tests.http.fakes import FakeEngine, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]
OTHERS: dict[str, Any] = {
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 6},
}


def client_with(engine: FakeEngine, **how: Any) -> TestClient:
    return TestClient(create_app(engine, ["tiny"], **how))


def tokens(reply: Any) -> list[str]:
    return reply.json()["choices"][0]["logprobs"]["tokens"]


def test_tokens_as_ids(engine: FakeEngine) -> None:
    client = client_with(engine, defaults=RequestDefaults(tokens_as_ids=True))
    body = {"prompt": "a", "logprobs": 0, "max_tokens": 1}
    assert tokens(client.post(COMPLETIONS, json=body)) == ["token_id:72"]
    for value, read in ((None, "token_id:72"), (True, "token_id:72"), (False, "H")):
        wanted = body | {"return_tokens_as_token_ids": value}
        assert tokens(client.post(COMPLETIONS, json=wanted)) == [read]
    chat = {"messages": MESSAGES, "logprobs": True, "max_tokens": 1}
    [entry] = client.post(CHAT, json=chat).json()["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "token_id:72"


def test_usage_at_the_end_of_every_stream(engine: FakeEngine) -> None:
    client = client_with(engine, defaults=RequestDefaults(include_usage=True))
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
        for options in (None, {"include_usage": False}, {"continuous_usage_stats": True}):
            asked = body | {"stream": True, "stream_options": options}
            *chunks, last = events(client.post(path, json=asked).text)
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
            assert all("usage" in chunk for chunk in chunks) == (
                options == {"continuous_usage_stats": True}
            )
        assert client.post(path, json=body).status_code == 200


def test_names_for_the_template(engine: FakeEngine) -> None:
    names = {"enable_thinking": False, "style": "plain"}
    client = client_with(engine, defaults=RequestDefaults(chat_template_kwargs=names))
    own = {"messages": MESSAGES, "chat_template_kwargs": {"style": "ornate"}}
    for body in ({"messages": MESSAGES}, own):
        assert client.post(CHAT, json=body).status_code == 200
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        assert engine.seen[-1].prompt == tokens
    for path, body in OTHERS.items():
        own = {"chat_template_kwargs": {"style": "ornate"}}
        assert [client.post(path, json=body | more).status_code for more in ({}, own)] == [200] * 2
    texts = [seen.text for seen in engine.seen]
    assert [text.partition("|style=")[2].partition("|")[0] for text in texts] == (
        ["plain", "ornate"] * 3
    )
    assert all(text.startswith("enable_thinking=False|style=") for text in texts)


def test_the_role_of_answers(engine: FakeEngine) -> None:
    client = client_with(engine, response_role="model")
    reply = client.post(CHAT, json={"messages": MESSAGES}).json()
    assert reply["choices"][0]["message"]["role"] == "model"
    [first, *_] = events(client.post(CHAT, json={"messages": MESSAGES, "stream": True}).text)
    assert first["choices"][0]["delta"]["role"] == "model"
