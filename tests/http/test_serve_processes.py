"""`paged serve` with the engine in a process of its own: how the two start, serve and end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from paged.http.cli import main
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from tests.http.servers import ROOT, Server, started
from tests.runtime.fakes import write_model
from tests.runtime.remote import is_gone, wait_until
from tests.runtime.test_core import MODEL

# The API process has no device to take: touching one would fail.
PROGRAM = """
import sys
import jax
from paged.http.cli import main
from paged.runtime import engine
from tests.runtime.remote import fake_remote
jax.config.update("jax_platforms", "none at all")
if "--real" in sys.argv:
    sys.argv.remove("--real")
else:
    engine.RemoteCore = lambda config: fake_remote("step_time=0.02", config.revision or "")
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", *sys.argv[1:]]))
"""
SIZES = ("--max-num-seqs=1", "--max-num-batched-tokens=16", "--kv-cache-memory-bytes=1m")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), MODEL | {"vocab_size": 300})


def server(model: Path, *flags: str) -> AbstractContextManager[Server]:
    return started(PROGRAM, str(model), "--load-format=dummy", *flags)


def engine_pid(running: Server) -> int:
    [child] = psutil.Process(running.process.pid).children()
    return child.pid


def is_down(health: str) -> bool:
    """It says so itself, until it is gone a moment later."""
    try:
        return httpx2.get(health).status_code == 503
    except httpx2.TransportError:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_lets_requests_finish(
    model: Path, number: signal.Signals
) -> None:
    with server(model) as running:
        pid = engine_pid(running)
        lines = running.stream()
        next(lines)
        os.killpg(running.process.pid, number)
        texts = [line for line in lines if '"text"' in line]
        assert "".join(re.findall('"text":"(a*)"', "".join(texts))).startswith("a" * 45)
        assert '"finish_reason":"length"' in texts[-1]
        assert running.process.wait(10) == 0
        assert is_gone(pid)


def test_a_killed_engine_process_ends_the_server(model: Path) -> None:
    with server(model, "--max-engine-restarts=0") as running:
        health = running.url.removesuffix("/v1") + "/health"
        assert httpx2.get(health).status_code == 200
        lines = running.stream(max_tokens=190)
        next(lines)
        os.kill(engine_pid(running), signal.SIGKILL)
        assert wait_until(lambda: is_down(health)) < 10
        *_, last, done = lines
        assert '"error"' in last
        assert done == "data: [DONE]"
        assert running.process.wait(10) == 1
        assert running.process.stderr
        assert "signal 9 (Killed)" in running.process.stderr.read()


def test_a_killed_server_takes_the_engine_process_along(model: Path) -> None:
    with server(model) as running:
        pid = engine_pid(running)
        running.process.kill()
        wait_until(lambda: is_gone(pid))


def test_what_the_engine_cannot_start_with_is_one_line(model: Path) -> None:
    statement = "from paged.errors import ConfigError; raise ConfigError('no room')"
    argv = [sys.executable, "-c", PROGRAM, str(model), "--load-format=dummy"]
    done = subprocess.run(
        [*argv, f"--revision={statement}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "paged: error: no room"
    assert "Traceback" not in done.stderr


def test_one_process_does_it_all_if_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: EngineConfig, *, separate_process: bool, **how: Any) -> None:
        raise ConfigError(f"{separate_process=}")

    monkeypatch.setattr(AsyncEngine, "from_config", refuse)
    for flags, chosen in (((), True), (("--no-engine-process",), False)):
        assert main(["serve", "--host=127.0.0.1", "--port=0", *flags]) == 2
        assert capsys.readouterr().err == f"paged: error: separate_process={chosen}\n"


@pytest.mark.slow
def test_the_whole_of_it(model: Path, tmp_path: Path) -> None:
    with server(model, "--real", f"--compile-cache-dir={tmp_path}", *SIZES) as running:
        assert len([line for line in running.stream() if '"text"' in line]) > 10
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(20) == 0
        assert running.process.stderr
        log = running.process.stderr.read()
    named = r"INFO \S+ \S+ paged.runtime.setup: "
    for expected in ("Loaded", "Memory:", "programs compiled, 0 from the cache", named):
        assert re.search(expected, log), f"the engine process said nothing of {expected!r}: {log}"
