"""`paged serve --api-server-count`: several processes that look like one server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
from paged.http import serve
from paged.http.cli import main
from paged.runtime.remote_core import RemoteCore
from tests.runtime.remote import fake_program
settings, statement, *argv = sys.argv[1:]
serve.RemoteCore = partial(RemoteCore, program=fake_program(settings, statement))
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", "--api-server-count=3", *argv]))
"""
COUNT = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), MODEL | {"vocab_size": 300})


@contextmanager
def server(model: Path, *flags: str) -> Iterator[tuple[Server, list[int]]]:
    """The server, and all processes that the first one has started."""
    argv = ("step_time=0.02", "", str(model), "--load-format=dummy", *flags)
    with started(PROGRAM, *argv) as running:
        children = psutil.Process(running.process.pid).children()
        assert len(children) == COUNT  # one is the engine's
        yield running, [child.pid for child in children]


def complete(url: str) -> None:
    """Over a connection of its own, which the kernel gives to any of the processes."""
    reply = httpx2.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 3})
    assert reply.status_code == 200


def counted(url: str, name: str) -> float:
    text = httpx2.get(url.removesuffix("/v1") + "/metrics").text
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
    with server(model) as (running, pids):
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
        (["--api-server-count=2", "--runner=pooling"], "made in one process"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--host=127.0.0.1", "--port=0", *flags]) == 2
    assert problem in capsys.readouterr().err
