"""Whatever a client sends, it gets OpenAI's error body and the right status, never a 500."""

import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.http.api.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from paged.http.app import create_app
from tests.http.fakes import FakeEngine, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def error_of(reply: Any) -> dict[str, Any]:
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == reply.status_code
    return error


def refusal(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post(COMPLETIONS, json={"prompt": "a"} | body)
    assert reply.status_code == 400, reply.text
    return error_of(reply)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b'{"prompt": "a"} trailing', None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": "\\ud800 half a character"}', None),
        (b'{"prompt": "a", "temperature": NaN}', None),
        (b"[]", None),
        (b'"prompt"', None),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "prompt": "a"}', None),
        (b"{}", "prompt"),
        (b'{"prompt": {"a": 1}}', "prompt"),
        (b'{"prompt": [true]}', "prompt[0]"),
        (b'{"prompt": "a", "max_tokens": "7"}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": ' + b"7" * 5000 + b"}", "max_tokens"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "stop": [1]}', "stop[0]"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        (b'{"prompt": "a", "stream_options": []}', "stream_options"),
    ],
)
def test_bodies_that_are_not_requests(client: TestClient, body: bytes, param: str | None) -> None:
    reply = client.post(COMPLETIONS, content=body, headers=JSON)
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["type"], error["param"]) == ("Bad Request", param)


def test_a_missing_field_inside_is_named_by_its_path(client: TestClient) -> None:
    error = error_of(client.post(CHAT, json={"messages": [{"content": "a"}]}))
    assert error["param"] == "messages[0].role"
    assert error["message"] == "messages[0].role: this field is required"


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
def test_only_json_is_read(client: TestClient, headers: dict[str, str]) -> None:
    reply = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert (reply.status_code, error_of(reply)["type"]) == (400, "Bad Request")


def test_content_types_may_have_parameters(client: TestClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_large_bodies_are_not_read(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, ["tiny"], max_body_size=100))
    assert client.post(COMPLETIONS, json={"prompt": "a" * 50}).status_code == 200
    reply = client.post(COMPLETIONS, json={"prompt": "a" * 100})
    assert reply.status_code == 413
    assert "100 bytes" in error_of(reply)["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["x"] * 65),
        ("stop", "x" * 1025),
        ("stop_token_ids", [0] * 600),
        ("logit_bias", {"5": 101}),
        ("logprobs", -1),
        ("cache_salt", ""),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_values_out_of_range(client: TestClient, field: str, value: Any) -> None:
    error = refusal(client, **{field: value})
    assert error["type"] == "BadRequestError"
    assert error["param"] == field


def test_a_request_asks_for_so_many_sequences_at_most(client: TestClient) -> None:
    assert refusal(client, prompt=["a"] * 513, n=2)["param"] == "n"


def test_messages_are_short_and_printable(client: TestClient) -> None:
    reply = client.post(COMPLETIONS, json={"prompt": "a", "model": "\x1b[31m\n" + "x" * 10_000})
    message = error_of(reply)["message"]
    assert len(message) < 700
    assert message.isprintable()


NOT_CARRIED_OUT = [
    *((COMPLETIONS, name, neutral) for name, neutral in COMPLETION_NEUTRAL.items()),
    *((CHAT, name, neutral) for name, neutral in CHAT_NEUTRAL.items()),
]


@pytest.mark.parametrize(("path", "name", "neutral"), NOT_CARRIED_OUT)
def test_what_is_not_carried_out_is_refused_unless_neutral(
    client: TestClient, path: str, name: str, neutral: tuple[Any, ...]
) -> None:
    body: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for value in (None, *neutral):
        assert client.post(path, json=body | {name: value}).status_code == 200
    error = error_of(client.post(path, json=body | {name: {"asks": "for something"}}))
    assert (error["code"], error["type"], error["param"]) == (400, "NotImplementedError", name)


@pytest.mark.parametrize("value", [b"7" * 5000, b"1e999", b'"\xff"'])
def test_a_value_that_cannot_be_read_is_not_neutral(client: TestClient, value: bytes) -> None:
    reply = client.post(
        COMPLETIONS,
        content=b'{"prompt": "a", "repetition_detection": ' + value + b"}",
        headers=JSON,
    )
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "repetition_detection"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_is_not_carried_out_may_depend_on_more(
    client: TestClient, body: Any, param: str
) -> None:
    messages = [{"role": "user", "content": "a"}]
    error = error_of(client.post(CHAT, json={"messages": messages} | body))
    assert (error["code"], error["type"], error["param"]) == (400, "NotImplementedError", param)


def test_fields_that_nobody_knows_are_ignored(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "paged.http")
    body = {"prompt": "a", "user": "me", "store": True, "metadata": {}, "frobnicate": 1}
    assert client.post(COMPLETIONS, json=body).status_code == 200
    [record] = caplog.records
    assert "frobnicate" in record.message


def test_there_are_only_so_many_fields(client: TestClient) -> None:
    body = {"prompt": "a"} | {f"field{number}": 1 for number in range(1000)}
    reply = client.post(COMPLETIONS, json=body)
    assert (reply.status_code, error_of(reply)["param"]) == (400, None)
    assert "got 1001" in error_of(reply)["message"]


def test_every_parameter_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    sampling = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"7": 1.5},
        "seed": 3,
        "max_tokens": 12,
        "min_tokens": 4,
        "stop": ["x"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    other = {"priority": 5, "cache_salt": "s"}
    assert client.post(COMPLETIONS, json={"prompt": "a"} | sampling | other).status_code == 200
    [seen] = engine.seen
    got = {name: getattr(seen.params, name) for name in sampling}
    assert got == sampling | {"logit_bias": {7: 1.5}}
    assert (seen.priority, seen.cache_salt) == (5, "s")


def test_null_is_the_same_as_leaving_a_field_out(client: TestClient, engine: FakeEngine) -> None:
    fields = ("n", "temperature", "stop", "max_tokens", "stream", "logprobs", "seed", "user")
    for body in ({}, dict.fromkeys(fields)):
        assert client.post(COMPLETIONS, json={"prompt": "a"} | body).status_code == 200
    first, second = engine.seen
    assert first.params == second.params


def test_models_have_names(client: TestClient) -> None:
    for name in (None, "", "tiny", "other-name"):
        reply = client.post(COMPLETIONS, json={"prompt": "a", "model": name})
        assert reply.json()["model"] == "tiny"
    reply = client.post(COMPLETIONS, json={"prompt": "a", "model": "gpt-5"})
    error = error_of(reply)
    assert (error["code"], error["type"], error["param"]) == (404, "NotFoundError", "model")
    expected = "The model `gpt-5` does not exist; this server has `tiny`, `other-name`"
    assert error["message"] == expected


def test_unknown_routes_and_verbs(client: TestClient) -> None:
    error = error_of(client.post("/chat/completions"))
    assert (error["code"], error["type"]) == (404, "Not Found")
    assert error["message"].startswith("There is no route /chat/completions; OpenAI's begin with")
    reply = client.get(COMPLETIONS)
    error = error_of(reply)
    assert (error["code"], error["message"]) == (405, f"{COMPLETIONS} takes POST, not GET")
    assert reply.headers["allow"] == "POST"


def test_a_dead_engine_says_so(client: TestClient, engine: FakeEngine) -> None:
    engine.errored = True
    error = error_of(client.post(COMPLETIONS, json={"prompt": "a"}))
    assert (error["code"], error["type"]) == (500, "InternalServerError")


def test_an_answer_that_ends_in_an_error_is_no_answer(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.ends_with = "error"
    error = error_of(client.post(COMPLETIONS, json={"prompt": "a"}))
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    reply = client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
    assert events(reply.text)[-1]["error"] == error


_MESSAGES = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


def test_our_own_mistakes_are_not_explained(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: 1 / 0)
    headers = {"Origin": "https://other.example", "X-Request-Id": "mine"}
    for path, said in ((COMPLETIONS, {"prompt": "a"}), ("/v1/messages", _MESSAGES)):
        reply = client.post(path, json=said, headers=headers)
        error = reply.json()["error"]
        assert (reply.status_code, error["message"]) == (500, "Internal server error")
        assert reply.headers["x-request-id"] == "mine"
        assert reply.headers["access-control-allow-origin"] == "*"
    with pytest.raises(ZeroDivisionError):  # which the log shows
        TestClient(client.app).post(COMPLETIONS, json={"prompt": "a"})


def test_ids_end_in_the_clients(client: TestClient, engine: FakeEngine) -> None:
    def reply_id(**headers: str) -> str:
        return client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers).json()["id"]

    assert reply_id(**{"X-Request-Id": "mine-1"}).endswith("-mine-1")
    assert reply_id(**{"X-Request-Id": "mine-1"}) != reply_id(**{"X-Request-Id": "mine-1"})
    odd = reply_id(**{"X-Request-Id": "a b/<x>" + "y" * 500})
    assert odd.isascii()
    assert "a_b__x_" in odd
    assert len(odd) < 120
