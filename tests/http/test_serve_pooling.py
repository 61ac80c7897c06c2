"""The life of a server whose model gives embeddings."""

import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from paged.http.cli import main
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.pooling.engine import PoolingEngine
from tests.http.servers import Server, started
from tests.models.harness import write_checkpoint
from tests.models.test_embedder_goldens import golden_of
from tests.runtime.pooling.pooling_fakes import letter_tokenizer
from tests.runtime.remote import is_gone, wait_until

# The real command line and server around a fake device: a tenth of a second for four texts, or none
# after a SIGUSR1.
FAKE = """
import signal, sys
from paged.http.cli import main
from paged.runtime.pooling.engine import PoolingEngine
from tests.runtime.pooling.pooling_fakes import FakeRunner, pooling_engine
runner = FakeRunner(pause=0.1)
signal.signal(signal.SIGUSR1, lambda *_: setattr(runner, "pause", 0.0))
PoolingEngine.from_config = lambda config, **how: pooling_engine(runner)
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", "--runner=pooling", *sys.argv[1:]]))
"""
# The same with the device in a process; those that follow the first wait while a file exists.
APART = """
import sys
from functools import partial
from paged.http.cli import main
from paged.runtime.pooling.engine import PoolingEngine
from tests.runtime.pooling.remote_fakes import remote_engine, remote_runner

def make(config, *, separate_process, keeping):
    assert separate_process
    statement = f"from pathlib import Path\\n    while Path({path!r}).exists(): time.sleep(0.01)"
    return remote_engine(remote_runner(), keeping, partial(remote_runner, "", statement))

PoolingEngine.from_config = make
path, *argv = sys.argv[1:]
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", "--runner=pooling", *argv]))
"""
REAL = """
import sys
from paged.http.cli import main
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", *sys.argv[1:]]))
"""


class Asking(threading.Thread):
    """A request on its way; `reply` once it has ended."""

    def __init__(self, url: str, body: Any) -> None:
        super().__init__()
        self.url, self.body = url, body
        self.start()

    def run(self) -> None:
        self.reply = httpx2.post(f"{self.url}/embeddings", json=self.body)


def wait_until_busy(running: Server) -> None:
    metrics = running.url.removesuffix("/v1") + "/metrics"
    idle = 'num_requests_running{engine="0",model_name="SmolLM2-135M-Instruct"} 0.0'
    wait_until(lambda: idle not in httpx2.get(metrics).text)


def test_a_signal_lets_running_requests_finish() -> None:
    with started(FAKE) as running:
        asking = Asking(running.url, {"input": ["a"] * 1000})
        wait_until_busy(running)
        running.process.send_signal(signal.SIGTERM)
        ready = running.url.removesuffix("/v1") + "/ready"
        wait_until(lambda: httpx2.get(ready).status_code == 503)
        running.process.send_signal(signal.SIGUSR1)
        assert running.process.wait(10) == 0
        asking.join()
        assert len(asking.reply.json()["data"]) == 1000
        assert running.process.stderr
        assert "Finishing running requests" in running.process.stderr.read()


def test_requests_that_take_too_long_are_told_so() -> None:
    with started(FAKE, "--shutdown-timeout=0.2") as running:
        asking = Asking(running.url, {"input": ["a"] * 2000})
        wait_until_busy(running)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0  # the texts take 50 s
        asking.join()
        assert asking.reply.status_code == 500
        assert "engine has stopped" in asking.reply.json()["error"]["message"]


def test_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    with started(APART, str(slow)) as running:
        root = running.url.removesuffix("/v1")
        body = {"input": ["a"] * 4}
        assert httpx2.post(f"{running.url}/embeddings", json=body).status_code == 200
        [process] = psutil.Process(running.process.pid).children()
        slow.touch()
        process.kill()
        wait_until(lambda: httpx2.get(f"{root}/ready").status_code == 503)
        reply = httpx2.post(f"{running.url}/embeddings", json=body)
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) > 0
        assert "being restarted" in reply.json()["error"]["message"]
        slow.unlink()
        wait_until(lambda: httpx2.get(f"{root}/ready").status_code == 200)
        assert httpx2.post(f"{running.url}/embeddings", json=body).status_code == 200
        counted = re.compile(r"^paged:engine_restarts_total{.*} 1", re.MULTILINE)
        wait_until(lambda: counted.search(httpx2.get(f"{root}/metrics").text))
        running.process.terminate()
        assert running.process.wait(10) == 0
        assert is_gone(process.pid)


def test_generating_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(golden_of("bert")["config"]))
    for command in (
        ["generate", "--prompt", "a", "--model"],
        ["serve", "--port=0", "--runner=generate"],
    ):
        assert main([*command, str(tmp_path)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("paged: error: ")
        assert "embeddings or scores" in line


def test_text_is_for_the_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    def choose(name: str) -> Any:
        def refuse(*args: Any, **how: Any) -> None:
            chosen.append(name)
            raise KeyboardInterrupt

        return refuse

    monkeypatch.setattr(PoolingEngine, "from_config", choose("pooling"))
    monkeypatch.setattr(AsyncEngine, "from_config", choose("text"))
    for flags in ((), ("--runner=pooling",), ("--runner=generate",)):
        assert main(["serve", "--host=127.0.0.1", "--port=0", *flags]) == 130
    assert chosen == ["text", "pooling", "text"]


@pytest.mark.slow
def test_the_whole_of_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, golden_of("roberta"))
    letter_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    sizes = ("--max-model-len=16", "--max-num-seqs=1", "--max-num-batched-tokens=16")
    with started(REAL, str(tmp_path), f"--compile-cache-dir={tmp_path}", *sizes) as running:
        reply = httpx2.post(f"{running.url}/embeddings", json={"input": ["a"] * 4}, timeout=20)
        assert len(reply.json()["data"][3]["embedding"]) == 72
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(20) == 0
