"""/tokenize and /detokenize say what generation reads."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.http.app import create_app
from tests.http.fakes import FakeEngine

HI = {"role": "user", "content": "Hi"}


def tokenize(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_prompt(client: TestClient, engine: FakeEngine) -> None:
    reply = tokenize(client, prompt="abc", model="tiny")
    assert reply == {"count": 4, "max_model_len": 64, "tokens": [0, 97, 98, 99]}
    client.post("/v1/completions", json={"prompt": "abc"})
    assert engine.seen[0].prompt == reply["tokens"]
    assert tokenize(client, prompt="", add_special_tokens=False)["tokens"] == []


def test_a_conversation(client: TestClient, engine: FakeEngine) -> None:
    how = {"messages": [HI], "chat_template_kwargs": {"mood": "good"}}
    reply = tokenize(client, **how, return_token_strs=True)
    client.post("/v1/chat/completions", json=how)
    assert engine.seen[0].prompt == reply["tokens"]
    assert "".join(reply["token_strs"]) == "mood=good|user:Hi|assistant:"
    closed = tokenize(client, messages=[HI], add_generation_prompt=False)
    assert bytes(closed["tokens"]) == b"user:Hi"
    with_tools = tokenize(client, messages=[HI], tools=[{"type": "function"}])
    assert bytes(with_tools["tokens"]).startswith(b"tools=1|")


def test_and_back(client: TestClient) -> None:
    reply = client.post("/detokenize", json={"tokens": [0, 97, 98]})
    assert (reply.status_code, reply.json()) == (200, {"prompt": "\0ab"})
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [HI]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 20_000}, "input_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [HI], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_what_has_no_answer(client: TestClient, path: str, body: Any, param: str) -> None:
    reply = client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_without_a_tokenizer(engine: FakeEngine) -> None:
    engine.tokenizer = None
    client = TestClient(create_app(engine, ["tiny"]))
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert client.post(path, json=body).status_code == 400
