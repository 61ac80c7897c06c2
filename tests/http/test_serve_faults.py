"""Engine processes that die or hang while a server serves: who is told what, and what follows."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.http.servers import Server, started
from tests.runtime.fakes import write_model
from tests.runtime.remote import command_line, is_gone, wait_until
from tests.runtime.test_core import MODEL

# Engines that hang in a step while a file `hang` exists, and in their start while `slow` does.
PROGRAM = """
import sys
from functools import partial
from paged.http import start
from paged.http.cli import main
from paged.runtime import engine
from paged.runtime.remote_core import RemoteCore
from tests.runtime.remote import fake_program
folder = sys.argv[1]
statement = f'''
    from pathlib import Path
    def wait(name):
        while Path({folder!r}, name).exists():
            time.sleep(0.01)
    core.on_step = lambda: wait("hang")
    wait("slow")
'''.strip()
make = partial(RemoteCore, program=fake_program("step_time=0.02", statement))
engine.RemoteCore = start.RemoteCore = make
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", *sys.argv[2:]]))
"""
# The same in a hurry, where the times that it is given up after do not matter.
HASTY = f"""
from paged.http import serve
from paged.runtime import remote_core
remote_core.TIME_TO_CLOSE = serve.LAST_WORDS = 0.5
serve.TIME_FOR_OTHERS = 2
{PROGRAM}
"""
# The same with steps that take their time: an answer of 190 tokens goes on for 19 s.
SLOW = PROGRAM.replace("step_time=0.02", "step_time=0.1")
COUNTS = pytest.mark.parametrize("count", [1, 2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), MODEL | {"vocab_size": 300})


@contextmanager
def server(folder: Path, *flags: str, program: str = PROGRAM) -> Iterator[Server]:
    flags = ("--load-format=dummy", "--shutdown-timeout=5", *flags)
    with started(program, str(folder), *flags, pattern=r"https?://\S+/v1") as running:
        yield running


def engines(running: Server) -> list[int]:
    """The server's engine processes, oldest first."""
    children = psutil.Process(running.process.pid).children()
    return [child.pid for child in children if "-c" in command_line(child.pid)]


def status(running: Server, path: str) -> int:
    with httpx2.Client() as client:
        return client.get(running.url.removesuffix("/v1") + path).status_code


def complete(running: Server, model: str | None = None) -> httpx2.Response:
    body = {"prompt": "abc", "max_tokens": 3, **({"model": model} if model else {})}
    with httpx2.Client() as client:
        return client.post(f"{running.url}/completions", json=body)


def is_later(reply: httpx2.Response) -> bool:
    """Whether it is a refusal that says when to come back."""
    if reply.status_code != 503:
        return False
    assert int(reply.headers["retry-after"]) > 0
    assert "being restarted" in reply.json()["error"]["message"]
    return True


def restarts(running: Server) -> int:
    text = httpx2.get(running.url.removesuffix("/v1") + "/metrics").text
    return sum(map(int, re.findall(r"^paged:engine_restarts_total{.*} (\d+)", text, re.MULTILINE)))


@COUNTS
def test_a_killed_engine_is_replaced(model: Path, tmp_path: Path, count: int) -> None:
    flags = (str(model), f"--api-server-count={count}")
    with server(tmp_path, *flags, program=SLOW) as running:
        streams = [running.stream(max_tokens=190) for _ in range(4)]  # some of each process
        for lines in streams:
            next(lines)
        [pid] = engines(running)
        (tmp_path / "slow").touch()
        os.kill(pid, signal.SIGKILL)
        for lines in streams:
            *_, last, done = lines
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
            assert done == "data: [DONE]"
        # Until each process knows.
        wait_until(lambda: all(is_later(complete(running)) for _ in range(6)))
        for _ in range(6):
            assert status(running, "/health") == status(running, "/ready") == 503
        assert status(running, "/v1/models") == 200
        (tmp_path / "slow").unlink()
        wait_until(lambda: all(status(running, "/ready") == 200 for _ in range(6)))
        for _ in range(6):
            assert complete(running).status_code == 200
        wait_until(lambda: restarts(running) == 1)
        assert is_gone(pid)
        running.process.terminate()
        assert running.process.wait(10) == 0


@COUNTS
def test_an_engine_that_hangs_holds_up_no_end(model: Path, tmp_path: Path, count: int) -> None:
    flags = ("--shutdown-timeout=0", f"--api-server-count={count}")
    with server(tmp_path, str(model), *flags, program=HASTY) as running:
        lines = running.stream()
        next(lines)
        [pid] = engines(running)
        (tmp_path / "hang").touch()
        running.process.terminate()
        assert running.process.wait(20) == 0
        assert is_gone(pid)
        assert running.process.stderr
        assert "The server has not come to its end" not in running.process.stderr.read()


@COUNTS
def test_an_engine_that_hangs_is_replaced(model: Path, tmp_path: Path, count: int) -> None:
    flags = ("--step-timeout=4", f"--api-server-count={count}")
    with server(tmp_path, str(model), *flags, program=SLOW) as running:
        for _ in range(6):
            complete(running)  # so that no step is among the first
        [pid] = engines(running)
        lines = running.stream(max_tokens=190)
        next(lines)
        start = time.monotonic()
        (tmp_path / "hang").touch()
        wait_until(lambda: status(running, "/health") == 503)
        assert not is_gone(pid), "it says so before the process is ended"
        *_, last, _ = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
        assert 3 < time.monotonic() - start < 30
        (tmp_path / "hang").unlink()
        wait_until(lambda: all(status(running, "/ready") == 200 for _ in range(4)))
        assert complete(running).status_code == 200
        running.process.terminate()
        assert running.process.wait(10) == 0
        assert running.process.stderr
        assert "at most 4 may" in running.process.stderr.read()


def test_a_stopped_engine_counts_as_one_that_hangs(model: Path, tmp_path: Path) -> None:
    with server(tmp_path, str(model), "--step-timeout=2") as running:
        complete(running)
        [pid] = engines(running)
        os.kill(pid, signal.SIGSTOP)
        assert complete(running).status_code == 500
        wait_until(lambda: complete(running).status_code == 200)
        assert is_gone(pid)


def test_whoever_dies_too_often_is_given_up(model: Path, tmp_path: Path) -> None:
    with server(tmp_path, str(model), "--max-engine-restarts=2") as running:
        os.kill(engines(running)[0], signal.SIGKILL)
        wait_until(lambda: restarts(running) == 1)
        os.kill(engines(running)[0], signal.SIGKILL)
        wait_until(lambda: restarts(running) == 2)
        os.kill(engines(running)[0], signal.SIGKILL)
        assert running.process.wait(10) == 1
        assert running.process.stderr
        assert "restarted 2 times in 600 s: giving up" in running.process.stderr.read()


@contextmanager
def two_models(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    config = folder / "models.yaml"
    names = ("left", "right")
    own = {"model": str(model), "load-format": "dummy", "kv-cache-memory-bytes": "1m"}
    models = [{**own, "served-model-name": name} for name in names]
    config.write_text(json.dumps({"models": models}))
    argv = (str(folder), f"--config={config}", *flags)
    with started(PROGRAM, *argv, pattern=r"http://\S+/v1") as running:
        yield running


def test_a_first_signal_while_it_leaves_for_a_dead_engine(model: Path, tmp_path: Path) -> None:
    """It is no second one: what other engines have begun is finished."""
    with two_models(model, tmp_path, "--max-engine-restarts=0") as running:
        lines = running.stream(max_tokens=150)
        next(lines)
        (tmp_path / "hang").touch()  # so that it lasts until the signal
        os.kill(engines(running)[1], signal.SIGKILL)
        wait_until(lambda: status(running, "/v1/models") == 503)
        running.process.terminate()
        (tmp_path / "hang").unlink()
        assert list(lines)[-1] == "data: [DONE]"
        assert running.process.wait(10) == 1


def test_other_models_go_on(model: Path, tmp_path: Path) -> None:
    with two_models(model, tmp_path) as running:
        (tmp_path / "slow").touch()
        os.kill(engines(running)[0], signal.SIGKILL)
        wait_until(lambda: is_later(complete(running, "left")))
        assert complete(running, "right").status_code == 200
        reply = httpx2.get(running.url.removesuffix("/v1") + "/health")
        assert reply.status_code == 503
        assert reply.json()["error"]["message"].startswith("The engine of left has stopped")
        (tmp_path / "slow").unlink()
        wait_until(lambda: complete(running, "left").status_code == 200)


@COUNTS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_is_restarted(
    model: Path, tmp_path: Path, count: int, number: signal.Signals
) -> None:
    with server(tmp_path, str(model), f"--api-server-count={count}") as running:
        (tmp_path / "slow").touch()
        [old] = engines(running)
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: [pid for pid in engines(running) if pid != old])
        [new] = [pid for pid in engines(running) if pid != old]
        os.killpg(running.process.pid, number)
        assert running.process.wait(10) == 0
        wait_until(lambda: is_gone(new))
