"""A client that goes away takes its request with it, at once and in every phase."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.http.fakes import FakeEngine
from tests.runtime.remote import wait_until

PAUSE = 0.1
PROMPTS: dict[str, Any] = {"prompt": ["a", "b"], "max_tokens": 60}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}

MESSAGE: dict[str, Any] = CHAT | {"max_tokens": 60}


def send(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname
    content = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    client = socket.create_connection((address.hostname, address.port), timeout=30)
    client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
    return client


@pytest.mark.parametrize(
    ("path", "body", "num_requests"),
    [
        ("/v1/chat/completions", CHAT, 1),
        ("/v1/chat/completions", CHAT | {"stream": True}, 1),
        ("/v1/responses", {"input": "a"}, 1),
        ("/v1/responses", {"input": "a", "stream": True}, 1),
        ("/v1/messages", MESSAGE, 1),
        ("/v1/messages", MESSAGE | {"stream": True}, 1),
        ("/v1/completions", PROMPTS, 2),
        ("/v1/completions", PROMPTS | {"stream": True}, 2),
    ],
)
@pytest.mark.parametrize("first_token", ["before", "after"])
def test_it_is_aborted_within_a_step(
    url: str,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    num_requests: int,
    first_token: str,
) -> None:
    engine.answer, engine.pause = "x" * 60, PAUSE if first_token == "after" else 10
    client = send(url, path, body)
    wait_until(lambda: len(engine.running) == num_requests)
    if first_token == "after":
        wait_until(lambda: engine.num_tokens > num_requests)
        if body.get("stream"):
            assert client.recv(15) == b"HTTP/1.1 200 OK"
    ids = set(engine.running)
    client.close()
    before = engine.num_tokens
    wait_until(lambda: not engine.running)
    assert engine.num_tokens - before <= 2 * num_requests, "those of a step or two"
    assert set(engine.aborted) == ids


def test_a_client_that_stays_is_not_aborted(url: str, engine: FakeEngine) -> None:
    client = send(url, "/v1/chat/completions", CHAT)
    assert client.recv(15) == b"HTTP/1.1 200 OK"
    client.close()
    assert engine.aborted == []
