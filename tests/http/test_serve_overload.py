"""Several API processes that are asked for more than they can do, or in too little time."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.http.api.test_disconnect import send
from tests.http.servers import started
from tests.runtime.fakes import write_model
from tests.runtime.test_core import MODEL

PROGRAM = "import sys; from paged.http.cli import main; sys.exit(main(sys.argv[1:]))"
SIZES = ("--max-num-seqs=2", "--max-num-batched-tokens=32", "--kv-cache-memory-bytes=1m")
FLAGS = ("--load-format=dummy", "--port=0", "--host=127.0.0.1", "--api-server-count=2", *SIZES)


def ask(url: str, **body: Any) -> httpx2.Response:
    """Over a connection of its own, which the kernel gives to any of the processes."""
    how = {"prompt": "abc", "temperature": 1, "ignore_eos": True} | body
    return httpx2.post(f"{url}/completions", json=how, timeout=60)


def ask_many(url: str, count: int, **body: Any) -> list[str]:
    """Heads of the replies to requests that come at the same moment."""
    how = {"prompt": "abc", "temperature": 1, "ignore_eos": True} | body
    clients = [send(url, "/v1/completions", how) for _ in range(count)]
    for client in clients:
        client.settimeout(60)
    heads = [client.recv(4096).decode().partition("\r\n\r\n")[0].lower() for client in clients]
    for client in clients:
        client.close()
    return heads


def gauge(url: str, name: str) -> float:
    text = httpx2.get(url.removesuffix("/v1") + "/metrics", timeout=30).text
    [line] = [line for line in text.splitlines() if line.startswith(name + "{")]
    return float(line.split()[-1])


@pytest.mark.slow
def test_one_bound_for_all_processes(tmp_path: Path) -> None:
    model = write_model(tmp_path, MODEL | {"vocab_size": 300})
    with started(PROGRAM, "serve", str(model), "--max-waiting=3", *FLAGS) as running:
        url = running.url
        heads = ask_many(url, 16, max_tokens=200)
        found = Counter(head.split()[1] for head in heads)
        assert found == {"200": 5, "503": 11}, "two run, three wait"
        assert sum("retry-after: " in head for head in heads) == 11
        assert ask(url, n=6, max_tokens=1).status_code == 400
        assert ask(url, n=5, max_tokens=1).status_code == 200
        late = ask_many(url, 4, max_tokens=200, timeout=0.02)
        assert {head.split()[1] for head in late} <= {"503", "504"}
        assert ask(url, max_tokens=200, timeout=60).status_code == 200
        time.sleep(0.5)
        for name in (
            "vllm:num_requests_running",
            "paged:waiting_tokens",
            "vllm:kv_cache_usage_perc",
        ):
            assert gauge(url, name) == 0
