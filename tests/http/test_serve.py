"""The life of a server process, from its port to its last request."""

import re
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager

import httpx2
import pytest

from paged.http.cli import main
from paged.http.listener import bound, where
from paged.http.options import ServeOptions
from tests.http.servers import ROOT, Server, started
from tests.runtime.remote import wait_until

# The real command line and server around the fake engine: a minute of answer, or what is left of it
# at once after a SIGUSR1.
PROGRAM = """
import signal, sys, time
from paged.http import server
from paged.http.cli import main
from paged.runtime.async_engine import AsyncEngine
from tests.http.fakes import FakeEngine
engine = FakeEngine(answer="x" * 1500, pause=0.04, max_model_len=2000)
signal.signal(signal.SIGUSR1, lambda *_: setattr(engine, "pause", 0.0))
engine.fails_after = 3 if "mortal" in sys.argv else None
if "stuck" in sys.argv:
    engine.shutdown = lambda: time.sleep(60)
    server.TIME_TO_LEAVE = 1
AsyncEngine.from_config = lambda config, **how: engine
sys.exit(main(["serve", "--port=0", *sys.argv[1:]]))
"""


def server(*flags: str) -> AbstractContextManager[Server]:
    return started(PROGRAM, "--host=127.0.0.1", *flags)


def wait_until_stopping(running: Server) -> None:
    """A signal is heard a moment after it was sent."""
    ready = running.url.removesuffix("/v1") + "/ready"
    wait_until(lambda: httpx2.get(ready).status_code == 503)


def test_it_says_where_it_is_and_what_it_serves() -> None:
    with server("--served-model-name", "a", "b", "--api-key", "k") as running:
        assert re.fullmatch(r"Ready: a at http://127\.0\.0\.1:\d+/v1\n", running.ready)
        assert httpx2.get(f"{running.url}/models").status_code == 401
        reply = httpx2.get(f"{running.url}/models", headers={"Authorization": "Bearer k"})
        assert [model["id"] for model in reply.json()["data"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("host", "has_keys", "remark"),
    [
        ("127.0.0.1", False, ""),
        ("0.0.0.0", True, " (on every interface)"),
        (
            "0.0.0.0",
            False,
            " (on every interface, no API key; --host 127.0.0.1 for this machine only)",
        ),
    ],
)
def test_it_says_who_else_can_reach_it(host: str, has_keys: bool, remark: str) -> None:
    options = ServeOptions(host=host, port=0, api_key=("k",) if has_keys else ())
    with bound(options) as listener:
        assert where(listener, options).endswith(f"/v1{remark}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(number: signal.Signals) -> None:
    with server() as running:
        lines = running.stream(max_tokens=1500)
        next(lines)
        running.process.send_signal(number)
        wait_until_stopping(running)
        root = running.url.removesuffix("/v1")
        for path in ("/v1/models", "/ready"):
            reply = httpx2.get(root + path)
            assert (reply.status_code, reply.headers["connection"]) == (503, "close")
            assert int(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["message"].startswith("This server is stopping")
        for path in ("/health", "/metrics"):
            reply = httpx2.get(root + path)
            assert reply.status_code == 200
        assert 'paged:requests_refused_total{cause="draining"} 1.0' in reply.text
        running.process.send_signal(signal.SIGUSR1)
        assert list(lines)[-1] == "data: [DONE]"
        assert running.process.wait(10) == 0


def test_requests_that_take_too_long_are_aborted() -> None:
    with server("--shutdown-timeout", "0.2") as running:
        lines = running.stream(max_tokens=1500)
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        *_, last, done = lines
        assert '"finish_reason":"abort"' in last
        assert done == "data: [DONE]"
        assert running.process.wait(10) == 0


def test_a_second_signal_does_not_wait() -> None:
    with server() as running:
        lines = running.stream(max_tokens=1500)
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        wait_until_stopping(running)
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(20)  # the stream takes a minute
        assert running.process.returncode == 128 + signal.SIGTERM


def test_whatever_hangs_it_leaves() -> None:
    with server("--served-model-name", "stuck", "--shutdown-timeout", "0") as running:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert running.process.stderr
        assert "The server has not come to its end in 1 s" in running.process.stderr.read()


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
    assert done.stderr == (
        f"paged: error: Cannot listen on 127.0.0.1 port {port}: it is taken, use another --port\n"
    )


def test_a_key_for_metrics_that_nobody_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is bound or loaded, instead of open metrics."""
    monkeypatch.delenv("PAGED_API_KEY", raising=False)
    assert main(["serve", "no-such-model", "--metrics-need-key", "--admin-api-key", "a"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "paged: error: --metrics-need-key needs --api-key, --api-keys-file or PAGED_API_KEY"
    )


def test_a_chat_template_that_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--chat-template", "nosuch"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("paged: error: --chat-template nosuch: neither a file that can be read")
