"""`paged serve --api-server-count`: several processes that look like one server."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from paged.http.cli import main
from tests.http.servers import ROOT, Server, started
from tests.runtime.fakes import write_model
from tests.runtime.remote import is_gone, wait_until
from tests.runtime.test_core import MODEL

PROGRAM = """
import sys
from functools import partial
from paged.http import start
from paged.http.cli import main
from paged.runtime.remote_core import RemoteCore
from tests.runtime.remote import fake_program
settings, statement, *argv = sys.argv[1:]
start.RemoteCore = partial(RemoteCore, program=fake_program(settings, statement))
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", "--api-server-count=3", *argv]))
"""
COUNT = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), MODEL | {"vocab_size": 300})


@contextmanager
def server(
    model: Path, *flags: str, num_engines: int = 1, step_time: float = 0.02
) -> Iterator[tuple[Server, list[int]]]:
    """The server, and all processes that the first one has started."""
    of_model = [] if model.suffix else [str(model)]  # else a file lists them
    argv = (f"step_time={step_time}", "", *of_model, "--load-format=dummy", *flags)
    with started(PROGRAM, *argv, pattern=r"https?://\S+/v1") as running:
        children = psutil.Process(running.process.pid).children()
        assert len(children) == COUNT - 1 + num_engines
        yield running, [child.pid for child in children]


def complete(url: str, **how: Any) -> None:
    """Over a connection of its own, which the kernel gives to any of the processes."""
    with httpx2.Client(**how) as client:
        reply = client.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 3})
        assert reply.status_code == 200


def counted(url: str, name: str, **how: Any) -> float:
    with httpx2.Client(**how) as client:
        text = client.get(url.removesuffix("/v1") + "/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))


def test_whoever_is_asked_answers_for_all(model: Path) -> None:
    with server(model) as (running, pids):
        for _ in range(12):
            complete(running.url)
        for _ in range(6):
            assert counted(running.url, "http_requests_total") == 12
            assert counted(running.url, "vllm:request_generation_tokens_sum") == 36
            assert counted(running.url, "vllm:request_success_total") == 12
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.process.wait(10) == 0
        assert all(is_gone(pid) for pid in pids)


def test_all_hold_to_the_same_flags(model: Path) -> None:
    flags = ("--api-key=k", "--max-body-size=2000", "--enable-tokenizer-info-endpoint")
    named = ("--served-model-name=m", "--chat-template={{ messages[0].content }}")
    role = ("--response-role=bot", "--root-path=/proxy")
    with server(model, *flags, *named, *role) as (running, _):
        root = running.url.removesuffix("/v1")
        key = {"Authorization": "Bearer k"}
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}

        def seen(path: str, body: dict[str, Any] | None = None, key: Any = key) -> httpx2.Response:
            verb = "GET" if body is None else "POST"
            return httpx2.request(verb, root + path, json=body, headers=key)

        for _ in range(8):
            assert seen("/health").status_code == 200
            assert seen("/v1/models", key={}).status_code == 401
            assert seen("/v1/models").json()["data"][0]["id"] == "m"
            assert seen("/v1/completions", {"prompt": "a" * 3000}).status_code == 413
            assert seen("/tokenizer_info").json()["chat_template"].startswith("{{ messages[0]")
            assert seen("/openapi.json").json()["servers"] == [{"url": "/proxy"}]
            reply = seen("/v1/chat/completions", chat).json()
            assert reply["choices"][0]["message"]["role"] == "bot"
            reply = seen("/v1/responses", {"input": "a", "previous_response_id": "resp_1"})
            assert "--api-server-count 1" in reply.json()["error"]["message"]


def test_load_is_of_all(model: Path) -> None:
    def load() -> int:
        return httpx2.get(f"{root}/load").json()["server_load"]

    with server(model, step_time=0.2) as (running, _):
        root = running.url.removesuffix("/v1")
        with ExitStack() as streams:
            for _ in range(4):
                lines = streams.enter_context(closing(running.stream(max_tokens=90)))
                next(lines)
            assert {load() for _ in range(6)} == {4}
        wait_until(lambda: load() == 0)


@pytest.mark.slow
def test_at_one_unix_socket(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "paged.sock"
    with server(model, f"--uds={path}") as (running, pids):
        for _ in range(6):
            complete(running.url, transport=httpx2.HTTPTransport(uds=str(path)))
        how = {"transport": httpx2.HTTPTransport(uds=str(path))}
        assert counted(running.url, "vllm:request_success_total", **how) == 6
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.process.wait(10) == 0
        assert all(is_gone(pid) for pid in pids)
    assert not path.exists()


@pytest.mark.slow
def test_with_a_certificate(model: Path, certificate: Path) -> None:
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    trust = {"verify": ssl.create_default_context(cafile=cert)}
    flags = (f"--ssl-certfile={cert}", f"--ssl-keyfile={key}")
    with server(model, *flags) as (running, _):
        for _ in range(6):
            complete(running.url, **trust)
        assert counted(running.url, "vllm:request_success_total", **trust) == 6


@pytest.mark.slow
def test_several_models(model: Path, tmp_path: Path) -> None:
    own = {"model": str(model), "kv-cache-memory-bytes": "1m"}
    models = [{**own, "served-model-name": name} for name in ("first", "second")]
    config = tmp_path / "models.yaml"
    config.write_text(json.dumps({"models": models}))  # JSON is YAML, too
    with server(config, f"--config={config}", num_engines=2) as (running, pids):
        for _ in range(6):
            for name in ("first", "second"):
                body = {"model": name, "prompt": "a", "max_tokens": 3}
                reply = httpx2.post(f"{running.url}/completions", json=body)
                assert reply.json()["model"] == name
        assert counted(running.url, "vllm:request_success_total") == 12
        assert counted(running.url, "vllm:request_generation_tokens_sum") == 36
        # An engine's own figures stand once, whichever of three processes says them.
        assert 36 <= counted(running.url, "paged:num_steps_total") < 100
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.process.wait(10) == 0
        assert all(is_gone(pid) for pid in pids)


@pytest.mark.slow
def test_all_finish_what_they_have_begun(model: Path) -> None:
    with server(model) as (running, pids):
        streams = [running.stream() for _ in range(8)]
        for lines in streams:
            next(lines)
        os.killpg(running.process.pid, signal.SIGTERM)
        for lines in streams:
            *_, last, done = lines
            assert '"finish_reason":"length"' in last
            assert done == "data: [DONE]"
        assert running.process.wait(10) == 0
        assert all(is_gone(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("which", range(COUNT))
def test_when_one_is_killed_the_others_leave(model: Path, which: int) -> None:
    with server(model, "--max-engine-restarts=0") as (running, pids):
        os.kill(pids[which], signal.SIGKILL)
        assert running.process.wait(20) == 1
        assert all(is_gone(pid) for pid in pids)


@pytest.mark.slow
def test_when_the_first_is_killed_all_leave(model: Path) -> None:
    with server(model) as (running, pids):
        running.process.kill()
        wait_until(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.slow
def test_what_the_engine_cannot_start_with_is_said_once(model: Path) -> None:
    statement = "from paged.errors import ConfigError; raise ConfigError('no room')"
    argv = [sys.executable, "-c", PROGRAM, "", statement, str(model), "--load-format=dummy"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "paged: error: no room"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--api-server-count=0"], "must be at least 1, got 0"),
        (["--api-server-count=2", "--no-engine-process"], "leave out --no-engine-process"),
        (["--api-server-count=2", "--runner=pooling"], "which one process does"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--host=127.0.0.1", "--port=0", *flags]) == 2
    assert problem in capsys.readouterr().err
