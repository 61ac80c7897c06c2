"""Probes are answered at once, whatever else the server is asked."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import httpx2
import pytest

from tests.http.test_serve_faults import model, server

__all__ = ["model"]  # a fixture

NUM_CLIENTS = 4


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_while_long_texts_are_tokenised(model: Path, tmp_path: Path, path: str) -> None:
    text = "many words " * 4500  # as long as it may be to be tokenised at all
    enough = threading.Event()
    others: list[float] = []

    def ask(url: str) -> None:
        with httpx2.Client() as client:
            while not enough.is_set():
                start = time.perf_counter()
                reply = client.post(f"{url}/tokenize", json={"prompt": text}, timeout=60)
                assert reply.status_code == 200
                others.append(time.perf_counter() - start)

    with server(tmp_path, str(model)) as running:
        root = running.url.removesuffix("/v1")
        clients = [threading.Thread(target=ask, args=(root,)) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        times: list[float] = []
        with httpx2.Client() as probe:
            while len(times) < 40 or len(others) <= NUM_CLIENTS:
                assert all(client.is_alive() for client in clients)
                start = time.perf_counter()
                assert probe.get(root + path, timeout=60).status_code == 200
                times.append(time.perf_counter() - start)
        enough.set()
        for each in clients:
            each.join()
    # Whoever stood in line with them would take about as long, on a machine as busy as it may be.
    assert statistics.median(times) < statistics.median(others) / 2
