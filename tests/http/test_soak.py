"""`benchmarks/soak.py`, a short form of it: the server is real, the device is not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import parse, soak
from tests.http.servers import ROOT
from tests.http.test_serve_faults import COUNTS, model, server
from tests.runtime.fakes import MAX_MODEL_LEN, VOCAB_SIZE

__all__ = ["model"]  # a fixture


@COUNTS
def test_nothing_goes_missing(model: Path, tmp_path: Path, count: int) -> None:
    options = parse(["--minutes=0.2", "--kill-every=2.5", "--clients=8"])
    flags = (f"--api-server-count={count}", "--max-engine-restarts=100", "--step-timeout=20")
    quiet = ("--disable-uvicorn-access-log", "--uvicorn-log-level=critical")
    with server(tmp_path, str(model), *flags, *quiet) as running:
        root, pid = running.url.removesuffix("/v1"), running.process.pid
        sizes = {"longest": MAX_MODEL_LEN, "vocab_size": VOCAB_SIZE}
        seen, wrong = asyncio.run(soak(root, pid, options, **sizes))
        assert wrong == []
        assert seen.kills > 0
        assert seen.answered > 20
        assert seen.failed > 0
        running.process.terminate()
        assert running.process.wait(20) == 0


@pytest.mark.slow
def test_with_a_model() -> None:
    argv = [sys.executable, "benchmarks/soak.py", "--minutes=1", "--kill-every=15", "--clients=8"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    assert "the engine was killed" in done.stdout
