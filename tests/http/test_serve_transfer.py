"""Two servers, one of which computes long prompts for the other."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.http.servers import Server, started
from tests.http.test_serve_hosts import engine_of
from tests.http.test_serve_spread import PROGRAM
from tests.models.harness import load_golden, write_checkpoint

GOLDEN = load_golden("llama")
SIZES = ("--max-num-seqs=4", "--max-num-batched-tokens=16", "--kv-cache-memory-bytes=1m")
LONG = 120  # seconds, of a start on a busy machine


@contextmanager
def servers(folder: Path) -> Iterator[tuple[Server, Server]]:
    """A prefill server, and a decode server that has begun to connect."""
    model = str(write_checkpoint(folder / "model", GOLDEN))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    both = (model, "--skip-tokenizer-init", f"--compile-cache-dir={folder / 'cache'}", *SIZES)
    asks = (f"--prefill-servers=127.0.0.1:{port}", "--min-remote-prefill-tokens=8")
    with (
        started(PROGRAM, *both, f"--kv-transfer-port={port}") as prefill,
        started(PROGRAM, *both, *asks, "--kv-offloading-size=0.01") as decode,
    ):
        yield prefill, decode


def tokens(server: Server, salt: str) -> list[int]:
    """Those that follow the golden prompt, nothing of which is cached under this salt."""
    body = {
        "prompt": GOLDEN["prompt"],
        "max_tokens": len(GOLDEN["greedy"]),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    reply = httpx2.post(f"{server.url}/completions", json=body, timeout=60).raise_for_status()
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def metric(server: Server, name: str, **labels: str) -> float:
    text = httpx2.get(server.url.replace("/v1", "/metrics"), timeout=10).text
    for line in text.splitlines():
        told = dict(re.findall(r'(\w+)="([^"]*)"', line))
        if line.startswith(f"{name}{{") and labels.items() <= told.items():
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"{name} {labels} is not there")


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_either_side_may_be_killed(tmp_path: Path) -> None:
    with servers(tmp_path) as (prefill, decode):
        salts = iter(map(str, range(10_000)))

        def is_handed_over() -> bool:
            """Whether the prefill server computes a prompt; what is answered is always the same."""
            before = metric(decode, "paged:remote_prefills_total", outcome="done")
            assert tokens(decode, next(salts)) == GOLDEN["greedy"]
            return metric(decode, "paged:remote_prefills_total", outcome="done") > before

        until(is_handed_over)
        by_source = "vllm:prompt_tokens_by_source_total"
        assert metric(decode, by_source, source="external_kv_transfer") > 0
        assert metric(decode, "paged:remote_prefill_bytes_total") > 0
        assert metric(prefill, "paged:served_prefills_total", outcome="done") > 0
        assert tokens(prefill, "own") == GOLDEN["greedy"]

        # The prefill server's engine is killed, and another one is started in its place.
        os.kill(engine_of(prefill.process), signal.SIGKILL)
        assert not is_handed_over()
        until(is_handed_over)

        # So is the decode server's, and then the prefill server as a whole.
        os.kill(engine_of(decode.process), signal.SIGKILL)
        health = decode.url.replace("/v1", "/health")
        until(lambda: httpx2.get(health, timeout=10).status_code == 503)
        until(lambda: httpx2.get(health, timeout=10).status_code == 200)
        until(is_handed_over)
        prefill.process.kill()
        assert not is_handed_over()
        assert decode.wait_after(signal.SIGTERM) < 10
        assert decode.process.returncode == 0
