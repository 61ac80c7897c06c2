"""Bodies and requests with anything wrong in them: answered or refused, never a failure."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient

from paged.http.api.errors import is_anthropic
from paged.http.app import create_app
from tests.http.fakes import FakeEngine
from tests.http.test_wire import WHOLE, answers, statuses
from tests.runtime.pooling.pooling_fakes import pooling_engine

_ASKED: dict[str, Any] = {
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "none"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
}
TEXT_ROUTES = {
    "/v1/completions": {"prompt": "a", "stop": ["x"], "logit_bias": {"5": 1}, "logprobs": 1},
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "none",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/tokenize": {"prompt": "a", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2]},
    "/invocations": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "a"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "a"},
        ],
        "instructions": "a",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "none",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "metadata": {"a": "b"},
        "truncation": "auto",
        "stream": True,
        "background": False,
    },
    "/v1/messages": _ASKED | {"max_tokens": 5, "stop_sequences": ["x"], "stream": True},
    "/v1/messages/count_tokens": _ASKED,
}
VECTOR_ROUTES = {
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
    "/score": {"text_1": "a", "text_2": ["b"]},
    "/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "/tokenize": {"prompt": "a"},
    "/invocations": {"input": "a"},
}
# What no JSON library writes, or what they do not agree on.
ODD = [
    *(b"NaN", b"-Infinity", b"1e400", b"-1e400", b"1e-400", b"-0", b"00", b"1.", b"9" * 400),
    *(
        b"9223372036854775808",
        b"18446744073709551616",
        b'"\\ud800"',
        b'"\\udfff\\ud800"',
        b'"\xff"',
    ),
    *(b'"\xed\xa0\x80"', b'"\\u0000"', b'"\x00"', b'"\\q"', b"'a'", b"[" * 5000, b"{}", b"[]", b""),
    *(b'{"a":' * 3000, b"\xef\xbb\xbf1", b"// a", b"true", b"null", b'""', b"[[[[1]]]]", b"[null]"),
    *(b'"' + "\U0001f600é\u2028".encode() + b'"', b"1,1", b'1,"prompt":2', b"-1", b"1.5", b"0x1"),
]


def places(text: bytes) -> list[tuple[int, int]]:
    """Where values are, ends included: each could be replaced, or cut off at."""
    found, decoder, plain = [], json.JSONDecoder(), text.decode()
    for start, character in enumerate(plain):
        if start and plain[start - 1] in " [{:" and character not in " ]}:,":
            found.append((start, decoder.raw_decode(plain, start)[1]))
    return found


@st.composite
def spoilt(draw: st.DrawFn, routes: dict[str, Any]) -> tuple[str, bytes]:
    """A route and a body that it would take, with up to three things wrong."""
    path = draw(st.sampled_from(sorted(routes)))
    text = json.dumps(routes[path]).encode()
    chosen = draw(st.lists(st.sampled_from(places(text)), min_size=1, max_size=3, unique=True))
    for start, end in sorted(chosen, reverse=True):
        text = text[:start] + draw(st.sampled_from(ODD) | st.binary(max_size=4)) + text[end:]
    return path, text


def fuzz(app: Starlette, routes: dict[str, Any], max_examples: int, *, derandomize: bool) -> None:
    client = TestClient(app, raise_server_exceptions=False)

    @settings(
        max_examples=max_examples,
        derandomize=derandomize,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(spoilt(routes))
    def answered(request: tuple[str, bytes]) -> None:
        path, body = request
        reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code in (200, 400, 404), reply.text
        if reply.status_code != 200:
            error = reply.json()["error"]
            assert error["message"]
            assert is_anthropic(path) or error["code"] == reply.status_code

    answered()


def fuzz_text(max_examples: int, *, derandomize: bool) -> None:
    app = create_app(FakeEngine(max_model_len=500), ["tiny"])
    fuzz(app, TEXT_ROUTES, max_examples, derandomize=derandomize)


def fuzz_vectors(max_examples: int, *, derandomize: bool) -> None:
    engine = pooling_engine(scores=False)
    try:
        fuzz(create_app(engine, ["tiny"]), VECTOR_ROUTES, max_examples, derandomize=derandomize)
    finally:
        engine.shutdown()


def test_every_route_takes_what_is_to_be_spoilt() -> None:
    client = TestClient(create_app(FakeEngine(max_model_len=500), ["tiny"]))
    for path, body in TEXT_ROUTES.items():
        assert client.post(path, json=body).status_code == 200
    engine = pooling_engine()
    for path, body in VECTOR_ROUTES.items():
        assert TestClient(create_app(engine, ["tiny"])).post(path, json=body).status_code == 200
    engine.shutdown()


@pytest.mark.parametrize("fuzz", [fuzz_text, fuzz_vectors])
def test_spoilt_bodies(fuzz: Any) -> None:
    fuzz(300, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fuzz", [fuzz_text, fuzz_vectors])
def test_many_more(fuzz: Any) -> None:
    fuzz(5000, derandomize=False)


def test_spoilt_requests(url: str) -> None:
    """Bytes changed anywhere, seen by the parser of HTTP."""

    @settings(
        max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        st.lists(
            st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 5), st.binary(max_size=5)),
            min_size=1,
            max_size=3,
        )
    )
    def answered(changes: list[tuple[int, int, bytes]]) -> None:
        sent = WHOLE
        for start, length, new in changes:
            sent = sent[:start] + new + sent[start + length :]
        assert all(status < 500 for status in statuses(answers(url, sent)))

    answered()
