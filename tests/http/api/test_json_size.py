"""Values are counted where they are values, and nowhere else."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from paged.http.api import json_size
from paged.http.api.json_size import MAX_STRUCTURE, MAX_VALUES, TooManyValues, check_num_values

TEXTS = st.text(st.sampled_from('a,:[]{}"\\\né'), max_size=9)
VALUES: Any = st.recursive(
    st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
)


def size(value: Any) -> tuple[int, int]:
    """Values that stand behind a comma or a bracket or are members, and those that cost more."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [size(each) for each in (value.values() if isinstance(value, dict) else value)]
    structure = 1 + (len(value) if isinstance(value, dict) else 0)
    values = structure + max(len(value) - 1, 0)
    return values + sum(each[0] for each in inner), structure + sum(each[1] for each in inner)


@given(VALUES, st.integers(1, 40))
@example(["\\", '"', '\\"[[['], 1)
def test_the_count_is_exact(value: Any, slice_size: int) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    num_values, structure = size(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "_SLICE", slice_size)
        for limits in (
            (num_values, structure),
            (num_values - 1, structure),
            (num_values, structure - 1),
        ):
            patch.setattr(json_size, "MAX_VALUES", limits[0])
            patch.setattr(json_size, "MAX_STRUCTURE", limits[1])
            fits = limits[0] >= num_values and limits[1] >= structure
            assert _refused(text) == (not fits)


def _refused(text: bytes) -> bool:
    try:
        json_size._count_exactly(text)
    except TooManyValues:
        return True
    return False


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"1," * MAX_VALUES + b"1]",
        b"[" + b"[]," * MAX_STRUCTURE + b"1]",
        b"[" * (MAX_STRUCTURE * 3),
        b"{" + b'"a":1,' * MAX_STRUCTURE + b'"a":1}',
    ],
)
def test_too_much(text: bytes) -> None:
    with pytest.raises(TooManyValues, match="2000000 values, or 200000 lists, objects"):
        check_num_values(text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"123456," * (MAX_VALUES - 2) + b"1]",
        b'["' + b"[{a: b}, " * MAX_VALUES + b'"]',
        b'["' + rb"\"[\\" * MAX_VALUES + b'"]',
        b"",
    ],
)
def test_much(text: bytes) -> None:
    check_num_values(text)


def test_no_route_reads_too_much(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    posts = [path for path, verbs in paths.items() if "requestBody" in verbs.get("post", {})]
    assert {"/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= {*posts}
    body, headers = b"[" * (MAX_STRUCTURE * 3), {"Content-Type": "application/json"}
    for path in [*posts, "/invocations"]:
        assert client.post(path, content=body, headers=headers).status_code == 413


def test_arguments_are_counted_too(client: TestClient) -> None:
    """They are JSON in a text, in which the body's own values do not count."""
    arguments = '{"a": [' + "[]," * MAX_STRUCTURE + "1]}"
    call = {"function": {"name": "f", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    reply = client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"] == "messages[0].tool_calls[0].function.arguments"
    assert "is too much: it holds more than" in error["message"]
