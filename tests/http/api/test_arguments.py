"""Arguments of calls, as models write them and clients send them back."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from paged.http.api.arguments import read_arguments
from paged.http.api.json_size import MAX_VALUES
from tests.http.fakes import FakeEngine

_TOO_MUCH = json.dumps({"a": [1] * (MAX_VALUES + 1)})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\ud83d\ude00 \uD83D\uDE00", "\U0001f600 \U0001f600"),
        (r"\ud83d", "\ufffd"),
        (r"\udE00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud83d \\\ud83d \u00e9\n", "\\ud83d \\\ufffd é\n"),
    ],
)
def test_halves_of_characters_are_replaced(text: str, value: str) -> None:
    assert read_arguments(f'{{"{text}": "{text}"}}') == {value: value}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": ', '{"a": 1e400}', '{"a": NaN}', '{"a":' * 5000, '{"a": "\\ud8"}']
)
def test_what_is_no_object_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_arguments(text)


def test_a_call_may_be_deeply_nested_and_cut(client: TestClient, engine: FakeEngine) -> None:
    engine.answer, engine.max_model_len = '{"a":' + "[" * 3000, 4000
    function: dict[str, Any] = {"name": "f"}
    asked = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2000,
        "tools": [function | {"input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    [block] = client.post("/v1/messages", json=asked).json()["content"]
    assert block["input"] == {}


def _sent_back(arguments: str) -> dict[str, dict[str, Any]]:
    """Bodies by their route."""
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "/v1/responses": {"input": [item], "max_output_tokens": 1},
        "/v1/chat/completions": {
            "messages": [{"role": "assistant", "tool_calls": [call]}],
            "max_tokens": 1,
        },
    }


@pytest.mark.parametrize("path", _sent_back(""))
def test_arguments_that_are_sent_back(client: TestClient, path: str) -> None:
    assert client.post(path, json=_sent_back(r'{"a": "\ud83d"}')[path]).status_code == 200
    error = client.post(path, json=_sent_back(_TOO_MUCH)[path]).json()["error"]
    assert error["code"] == 400
    assert "arguments is too much" in error["message"]
    error = client.post(path, json=_sent_back("[]")[path]).json()["error"]
    assert "must be a JSON object in a string" in error["message"]
