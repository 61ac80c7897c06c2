"""The life of a server of several models: they start one by one, and end together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from openai import OpenAI

from tests.http.servers import ROOT, Server, started
from tests.models.harness import write_checkpoint
from tests.models.test_embedder_goldens import golden_of
from tests.runtime.fakes import write_model
from tests.runtime.pooling.pooling_fakes import letter_tokenizer
from tests.runtime.remote import command_line, is_gone, spawned, wait_until
from tests.runtime.test_core import MODEL

# The API process has no device to take: touching one would fail. The engines are fake ones in real
# processes, which run what stands for their revision before they are ready.
PROGRAM = """
import sys
import jax
from paged.http.cli import main
from paged.runtime import engine
from paged.runtime.pooling import remote
from tests.runtime.pooling.remote_fakes import ready_with, remote_runner
from tests.runtime.remote import fake_remote
jax.config.update("jax_platforms", "none at all")
if "--real" in sys.argv:
    sys.argv.remove("--real")
else:
    engine.RemoteCore = lambda config: fake_remote("step_time=0.02", config.revision or "")
    remote.prepare_apart = lambda config: ready_with(remote_runner("", config.revision or ""))
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {name: folder / name for name in ("talker", "embedder")}
    for each in found.values():
        each.mkdir()
    write_model(found["talker"], MODEL | {"vocab_size": 300})
    write_checkpoint(found["embedder"], golden_of("roberta"))
    letter_tokenizer().backend.save(str(found["embedder"] / "tokenizer.json"))
    return found


def config_file(path: Path, folders: dict[str, Path], **changes: dict[str, Any]) -> Path:
    """Two models; JSON is YAML, too."""
    own: dict[str, dict[str, Any]] = {
        "talker": {
            "served-model-name": ["talker", "gpt"],
            "load-format": "dummy",
            "kv-cache-memory-bytes": "1m",
        },
        "embedder": {"served-model-name": "embedder", "max-model-len": 16},
    }
    models = [{"model": str(folders[name]), **own[name], **changes.get(name, {})} for name in own]
    path.write_text(json.dumps({"models": models}))
    return path


@pytest.fixture
def both(tmp_path: Path, folders: dict[str, Path]) -> Path:
    return config_file(tmp_path / "models.yaml", folders)


def server(config: Path, *flags: str) -> AbstractContextManager[Server]:
    return started(PROGRAM, "--config", str(config), *flags)


def engine_pids(process: int) -> list[int]:
    return [child.pid for child in psutil.Process(process).children()]


def failure(config: Path) -> list[str]:
    """What a server says that does not start."""
    argv = [sys.executable, "-c", PROGRAM, "--config", str(config)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


def test_both_serve_and_end_together(both: Path) -> None:
    with server(both) as running:
        assert running.ready.startswith("Ready: talker, embedder at http://127.0.0.1:")
        pids = engine_pids(running.process.pid)
        assert len(pids) == 2
        with OpenAI(base_url=running.url, api_key="any", max_retries=0) as client:
            ids = [model.id for model in client.models.list()]
            assert ids == ["talker", "gpt", "embedder"]
            assert client.completions.create(model="gpt", prompt="a").model == "talker"
            vectors = client.embeddings.create(model="embedder", input=["a", "b"]).data
            assert [each.embedding[1] for each in vectors] == [3, 3]
            with pytest.raises(openai.BadRequestError, match="ask `talker`"):
                client.completions.create(model="embedder", prompt="a")
            with pytest.raises(openai.NotFoundError, match="`talker`, `gpt`, `embedder`"):
                client.embeddings.create(model="gpt-5", input="a")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(10) == 0
        assert all(map(is_gone, pids))
        assert running.process.stderr
        log = running.process.stderr.read()
    for name, number in (("talker", 1), ("embedder", 2)):
        assert f"[{name}] paged.http.start: Starting model {number} of 2" in log


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_engine_ends_them_all(both: Path, victim: int) -> None:
    with server(both, "--max-engine-restarts=0") as running:
        health = running.url.removesuffix("/v1") + "/health"
        assert httpx2.get(health).status_code == 200
        pids = engine_pids(running.process.pid)
        os.kill(pids[victim], signal.SIGKILL)
        name = ["talker", "embedder"][victim]
        seen: list[str] = []

        def is_down() -> bool:
            try:
                reply = httpx2.get(health)
            except httpx2.TransportError:  # it is leaving, or has left
                return True
            seen.append(reply.text)
            return reply.status_code == 503

        wait_until(is_down)
        assert running.process.wait(10) == 1
        assert all(map(is_gone, pids))
        assert running.process.stderr
        assert f"The engine of {name} has stopped; shutting down" in running.process.stderr.read()
        assert all(name in text for text in seen if text)


def test_one_that_cannot_start_is_named_and_ends_the_others(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    pid = tmp_path / "pid"
    ends = "from paged.errors import ConfigError; raise ConfigError('no room')"
    config = config_file(
        tmp_path / "models.yaml",
        folders,
        talker={"revision": f"open({str(pid)!r}, 'w').write(str(os.getpid()))"},
        embedder={"revision": ends},
    )
    assert failure(config)[-1] == "paged: error: embedder: no room"
    assert is_gone(int(pid.read_text()))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_ends_those_that_are_starting(
    tmp_path: Path, folders: dict[str, Path], number: signal.Signals
) -> None:
    hangs = {"revision": "time.sleep(60)"}
    config = config_file(tmp_path / "models.yaml", folders, embedder=hangs)
    argv = [sys.executable, "-c", PROGRAM, "--config", str(config)]
    quiet = {"stderr": subprocess.DEVNULL, "start_new_session": True}
    with spawned(argv, cwd=ROOT, **quiet) as process:
        pids: list[int] = []

        def both_are_there() -> bool:
            pids[:] = engine_pids(process.pid)
            programs = map(command_line, pids)
            return [any("Runner" in arg for arg in each) for each in programs] == [False, True]

        wait_until(both_are_there, 60)
        os.killpg(process.pid, number)
        assert process.wait(10) == 0
        wait_until(lambda: all(map(is_gone, pids)))


def test_memory_that_is_not_stated_is_refused_with_numbers(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    unstated = {"kv-cache-memory-bytes": None}
    config = config_file(tmp_path / "models.yaml", folders, talker=unstated)
    first, *lines = failure(config)
    assert re.match(r"paged: error: The models cannot share the .* that this machine has", first)
    assert lines[-2:] == [
        "  talker: states no kv-cache-memory-bytes, which counts on a CPU",
        "  This would do: kv-cache-memory-bytes 1024M for talker",
    ]


@pytest.mark.slow
def test_the_whole_of_it(both: Path, tmp_path: Path) -> None:
    sizes = ("--max-num-seqs=1", "--max-num-batched-tokens=16", f"--compile-cache-dir={tmp_path}")
    with server(both, "--real", *sizes) as running:
        with OpenAI(base_url=running.url, api_key="any", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "a"}]
            chat = client.chat.completions.create(model="gpt", messages=messages, max_tokens=5)
            assert chat.usage
            assert chat.usage.completion_tokens == 5
            [vector] = client.embeddings.create(model="embedder", input="a").data
            assert len(vector.embedding) == 72
        metrics = httpx2.get(running.url.removesuffix("/v1") + "/metrics").text
        assert 'vllm:generation_tokens_total{engine="0",model_name="talker"} 5.0' in metrics
        assert 'vllm:prompt_tokens_total{engine="1",model_name="embedder"} 3.0' in metrics
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(20) == 0
        assert running.process.stderr
        log = running.process.stderr.read()
    for name, module in (("talker", "runtime.setup"), ("embedder", "runtime.compiler")):
        assert re.search(rf"INFO \S+ \S+ \[{name}\] paged\.{module}: ", log), log
