"""What a server says while its models are loaded, and how it ends then."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import httpx2
import psutil
import pytest

from paged.http import serve
from paged.http.options import ServeOptions
from paged.http.server import Opened
from paged.runtime.errors import ConfigError
from tests.http.servers import ROOT
from tests.runtime.fakes import write_model
from tests.runtime.remote import is_gone, spawned, wait_until
from tests.runtime.test_core import MODEL

# An engine process that has got half-way, and waits for a file to go on.
PROGRAM = """
import sys
from functools import partial
from paged.http.cli import main
from paged.http import start
from paged.runtime import engine
from paged.runtime.remote_core import RemoteCore
from tests.runtime.remote import fake_program
statement = f'''
    from pathlib import Path
    from paged.models.reports import Report, report
    report(Report("Loading weights", "B", 50, 100))
    Path({sys.argv[1]!r} + f"/{{os.getpid()}}.pid").touch()
    while not Path({sys.argv[1]!r}, "go").exists():
        time.sleep(0.01)
'''.strip()
make = partial(RemoteCore, program=fake_program("", statement))
engine.RemoteCore = start.RemoteCore = make
sys.exit(main(["serve", "--host=127.0.0.1", *sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), MODEL | {"vocab_size": 300})


class Starting:
    """A server that does not get on with its start.

    Attributes:
        engine: its engine process.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        wait_until(lambda: [*folder.glob("*.pid")])
        [pid] = folder.glob("*.pid")
        self.engine = int(pid.stem)

    @property
    def root(self) -> str:
        """Where it will serve: at a port that it has found free itself."""
        ports: set[int] = set()

        def listens() -> bool:
            sockets = psutil.Process(self.process.pid).net_connections("tcp")
            ports.update(each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN)
            return bool(ports)

        wait_until(listens)
        [port] = ports
        return f"http://127.0.0.1:{port}"


@contextmanager
def starting(model: Path, folder: Path, *flags: str) -> Iterator[Starting]:
    with spawned(
        [sys.executable, "-c", PROGRAM, str(folder), "--port=0", str(model), *flags],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        yield Starting(process, folder)


def told_by_the_first(url: str) -> dict[str, Any]:
    """What a probe is told by the first API process, which loads; others say that they start."""
    while True:
        reply = httpx2.get(url)
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) > 0
        told: dict[str, Any] = reply.json()
        assert told["status"] == "loading"
        if told["phase"] != "starting":
            assert told["phase"] == "loading_weights"
            return told


@pytest.mark.parametrize("count", [1, 2])
def test_probes_are_told_how_the_start_gets_on(model: Path, tmp_path: Path, count: int) -> None:
    flags = ("--load-format=dummy", f"--api-server-count={count}")
    with starting(model, tmp_path, *flags) as server:
        root = server.root
        for path in ("/health", "/ready", "/ping"):
            told = told_by_the_first(root + path)
            assert (told["done"], told["total"], told["unit"]) == (50, 100, "bytes")
            assert told["fraction"] == 0.5
            assert 0 <= told["seconds_left"] <= told["seconds"]
        body = {"prompt": "a" * 100_000}
        for reply in (
            httpx2.post(f"{root}/v1/completions", json=body),
            httpx2.get(f"{root}/metrics"),
            httpx2.get(f"{root}/nowhere"),
        ):
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) > 0
            assert re.search(r"being loaded \((starting|loading_weights)\)", reply.text)
            assert reply.headers["x-request-id"]
        (tmp_path / "go").touch()
        assert server.process.stdout
        assert server.process.stdout.readline().startswith("Ready: ")
        assert httpx2.get(f"{root}/ready").status_code == 200
        metrics = httpx2.get(f"{root}/metrics").text
        assert 'paged:requests_refused_total{cause="loading"} 2.0' in metrics
        server.process.terminate()
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_ends_it(model: Path, tmp_path: Path, number: signal.Signals, count: int) -> None:
    flags = ("--load-format=dummy", f"--api-server-count={count}")
    with starting(model, tmp_path, *flags) as server:
        server.process.send_signal(number)
        assert server.process.wait(10) == 0
        assert server.process.stderr
        assert "Traceback" not in server.process.stderr.read()
        wait_until(lambda: is_gone(server.engine))


def test_a_signal_while_this_process_loads_waits_for_nothing() -> None:
    """Neither for the thread that loads nor for those that it has started."""
    may_go_on = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def load(stack: ExitStack) -> Opened:
            assert httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 503
            os.kill(os.getpid(), signal.SIGTERM)
            may_go_on.wait(20)
            raise ConfigError("nobody waits for this any more")

        assert serve.serve(load, listener, ServeOptions()) is None
        may_go_on.set()
    wait_until(lambda: not [each for each in threading.enumerate() if isinstance(each, Timer)])


def test_what_is_still_loading_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    assert serve.leave(1) == 1
    assert left == []
    serve.leave(None)
    assert left == [0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ConfigError])
def test_whatever_ends_the_loading_the_doors_are_closed(error: type[BaseException]) -> None:
    """A loop that is closed while its server listens warns, and here a warning is an error that
    leaves uvloop waiting for ever.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def load(stack: ExitStack) -> Opened:
            assert httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 503
            raise error

        with pytest.raises(error):
            serve.serve(load, listener, ServeOptions())


def test_a_signal_leaves_no_socket_behind(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "paged.sock"
    with starting(model, tmp_path, "--load-format=dummy", f"--uds={path}") as server:
        assert path.is_socket()
        server.process.terminate()
        assert server.process.wait(10) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("no-such-model",), "no-such-model"),
        (("--load-format=dummy", "--max-num-seqs=0"), "--max-num-seqs"),
        (("--host=300.1.1.1",), "Cannot listen on 300.1.1.1"),
    ],
)
def test_what_it_cannot_start_with_is_one_line(
    model: Path, flags: tuple[str, ...], complaint: str
) -> None:
    has_model = any(not flag.startswith("--") for flag in flags)
    argv = [*flags, *([] if has_model else [str(model)])]
    done = subprocess.run(
        [sys.executable, "-m", "paged.http", "serve", "--port=0", "--host=127.0.0.1", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if not re.match("(INFO|WARNING) ", line)]
    assert line.startswith("paged: error: ")
    assert complaint in line


def test_no_gpu_is_one_line(model: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "paged.http",
            "serve",
            "--port=0",
            str(model),
            "--load-format=dummy",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cuda"},
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("paged: error: JAX finds no device of cuda")
