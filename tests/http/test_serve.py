"""The life of a server process, from its port to its last request."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

ROOT = Path(__file__).parent.parent.parent
# The real command line and server around the fake engine: two seconds of answer.
PROGRAM = """
import sys
from paged.http.cli import main
from paged.runtime.async_engine import AsyncEngine
from tests.http.fakes import FakeEngine
engine = FakeEngine(answer="x" * 50, pause=0.04)
engine.fails_after = 3 if "mortal" in sys.argv else None
AsyncEngine.from_config = lambda config, **how: engine
sys.exit(main(["serve", "--port=0", *sys.argv[1:]]))
"""


class Server:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        self.process = process
        self.ready = process.stdout.readline()
        [self.url] = re.findall(r"http://\S+/v1$", self.ready.strip())

    def stream(self) -> Iterator[str]:
        """Lines of an answer, as they come."""
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 50, "stream": True}
        with httpx2.stream("POST", f"{self.url}/completions", json=body, timeout=10) as reply:
            yield from filter(None, reply.iter_lines())

    def wait_after(self, *signals: signal.Signals) -> float:
        """Seconds that it takes to leave."""
        start = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)  # signals of one kind that are pending together count once
        self.process.wait(10)
        return time.monotonic() - start


@contextmanager
def server(*flags: str) -> Iterator[Server]:
    argv = [sys.executable, "-c", PROGRAM, "--host=127.0.0.1", *flags]
    with subprocess.Popen(
        argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def test_it_says_where_it_is_and_what_it_serves() -> None:
    with server("--served-model-name", "a", "b", "--api-key", "k") as running:
        assert re.fullmatch(r"Ready: a at http://127\.0\.0\.1:\d+/v1\n", running.ready)
        assert httpx2.get(f"{running.url}/models").status_code == 401
        reply = httpx2.get(f"{running.url}/models", headers={"Authorization": "Bearer k"})
        assert [model["id"] for model in reply.json()["data"]] == ["a", "b"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(number: signal.Signals) -> None:
    with server() as running:
        lines = running.stream()
        next(lines)
        running.process.send_signal(number)
        time.sleep(0.3)
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{running.url}/models")
        assert list(lines)[-1] == "data: [DONE]"
        assert running.process.wait(10) == 0


def test_requests_that_take_too_long_are_aborted() -> None:
    with server("--shutdown-timeout", "0.2") as running:
        lines = running.stream()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        *_, last, done = lines
        assert '"finish_reason":"abort"' in last
        assert done == "data: [DONE]"
        assert running.process.wait(10) == 0


def test_a_second_signal_does_not_wait() -> None:
    with server() as running:
        lines = running.stream()
        next(lines)
        assert running.wait_after(signal.SIGTERM, signal.SIGTERM) < 1
        assert running.process.returncode == 128 + signal.SIGTERM


def test_it_leaves_when_the_engine_dies() -> None:
    with server("--served-model-name", "mortal") as running:
        assert '"error"' in list(running.stream())[-2]
        assert running.process.wait(10) == 1


def test_a_port_in_use_is_said_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = [sys.executable, "-m", "paged.http", "serve", "no-such-model"]
        done = subprocess.run(
            [*argv, "--host=127.0.0.1", f"--port={port}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"paged: error: Cannot listen on 127.0.0.1 port {port}: ")
