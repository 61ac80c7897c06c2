"""Chat: what goes to the engine, and what comes back, whole."""

from typing import Any

import pytest
from starlette.testclient import TestClient

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json={"messages": MESSAGES} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json={"messages": MESSAGES} | body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def test_a_whole_reply(client) -> None:
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
