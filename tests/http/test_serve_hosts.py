"""`paged serve` over several processes, as over several hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paged.runtime.llm import LLM
from paged.runtime.sampling_params import SamplingParams
from tests.http.servers import ROOT, Server, started
from tests.http.test_serve_spread import PROGRAM
from tests.models.harness import load_golden, write_checkpoint
from tests.runtime.remote import spawned

GOLDEN = load_golden("llama")
SIZES = ("--max-num-seqs=1", "--max-num-batched-tokens=16", "--kv-cache-memory-bytes=1m")
LONG = 240  # seconds, of a start on a busy machine


@contextmanager
def headless(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """The process of another rank."""
    command = [sys.executable, "-c", PROGRAM, *argv, "--headless"]
    with spawned(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        yield process


@contextmanager
def hosts(
    folder: Path, number: int, *flags: str
) -> Iterator[tuple[Server, list[subprocess.Popen[str]]]]:
    """A server on rank 0, ready, and the processes of all other ranks."""
    model = str(write_checkpoint(folder / "model", GOLDEN))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = (
        *(model, f"--nnodes={number}", f"--master-port={port}", "--skip-tokenizer-init"),
        *(f"--compile-cache-dir={folder / 'cache'}", "--disable-uvicorn-access-log"),
        *SIZES,
        *flags,
    )
    with ExitStack() as stack:
        ranks = range(1, number)
        others = [stack.enter_context(headless(*shared, f"--node-rank={n}")) for n in ranks]
        yield stack.enter_context(started(PROGRAM, *shared)), others


def ask(server: Server, **fields: Any) -> httpx2.Response:
    body = {
        "prompt": GOLDEN["prompt"],
        "max_tokens": len(GOLDEN["greedy"]),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return httpx2.post(f"{server.url}/completions", json=body | fields, timeout=60)


def tokens(server: Server) -> list[int]:
    reply = ask(server)
    found: list[int] = reply.raise_for_status().json()["choices"][0]["token_ids"]
    return found


def health(server: Server) -> int:
    return httpx2.get(server.url.replace("/v1", "/health"), timeout=10).status_code


def await_health(server: Server, status: int) -> None:
    end = time.monotonic() + LONG
    while health(server) != status:
        assert time.monotonic() < end, f"/health did not become {status}"
        time.sleep(0.05)


def engine_of(process: subprocess.Popen[str]) -> int:
    """The process that a headless one has started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


@pytest.fixture(autouse=True)
def one_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hosts_answer_as_one_device_and_outlive_each_other(tmp_path: Path) -> None:
    with hosts(tmp_path, 2, "--tensor-parallel-size=2") as (server, [other]):
        assert tokens(server) == GOLDEN["greedy"]
        assert ask(server, temperature=1, frequency_penalty=1, logit_bias={"5": 4}).is_success
        assert ask(server, logprobs=3, prompt_logprobs=1).is_success

        # In the middle of an answer the other host is lost: it ends with an error.
        body = {"prompt": [1, 2], "max_tokens": 250, "return_token_ids": True, "stream": True}
        asked = body | {"ignore_eos": True}
        with httpx2.stream("POST", f"{server.url}/completions", json=asked, timeout=60) as reply:
            lines = filter(None, reply.iter_lines())
            next(lines)
            os.kill(engine_of(other), signal.SIGKILL)
            assert any('"error"' in line for line in lines)
        await_health(server, 503)
        await_health(server, 200)
        assert tokens(server) == GOLDEN["greedy"]

        # While nothing runs.
        os.kill(engine_of(other), signal.SIGKILL)
        await_health(server, 503)
        await_health(server, 200)
        assert tokens(server) == GOLDEN["greedy"]
        assert server.wait_after(signal.SIGTERM) < 10
        assert server.process.returncode == 0

        other.terminate()
        assert other.wait(10) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hosts_with_a_stage_each(tmp_path: Path) -> None:
    with hosts(tmp_path, 2, "--pipeline-parallel-size=2") as (server, [other]):
        assert tokens(server) == GOLDEN["greedy"]
        assert ask(server, temperature=1, frequency_penalty=1, logit_bias={"5": 4}).is_success
        assert ask(server, logprobs=3, prompt_logprobs=1).is_success
        os.kill(engine_of(other), signal.SIGKILL)
        await_health(server, 503)
        await_health(server, 200)
        assert tokens(server) == GOLDEN["greedy"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("shared", "fewer"),
    [
        ("--tensor-parallel-size=2", {"kv_cache_dtype": "int8"}),
        ("--pipeline-parallel-size=2", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ],
    ids=("shares", "stages"),
)
def test_two_hosts_of_fewer_bits(shared: str, fewer: dict[str, str], tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in fewer.items()]
    with hosts(tmp_path, 2, shared, *flags) as (server, _):
        found = tokens(server)
    llm = LLM(
        str(tmp_path / "model"),
        skip_tokenizer_init=True,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=2**20,
        compile_cache_dir="",
        **fewer,
    )
    params = SamplingParams(temperature=0, max_tokens=len(found), ignore_eos=True)
    [alone] = llm.generate([GOLDEN["prompt"]], params, use_tqdm=False)
    assert found == list(alone.outputs[0].token_ids)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_hosts(tmp_path: Path) -> None:
    """Twice as many as there are key/value heads."""
    with hosts(tmp_path, 4, "--tensor-parallel-size=4") as (server, _):
        assert tokens(server) == GOLDEN["greedy"]
