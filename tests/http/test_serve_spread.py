"""`paged serve` of a model that several devices share."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.http.servers import started
from tests.models.harness import load_golden, write_checkpoint
from tests.models.test_spread import ENVIRONMENT

PROGRAM = """
import sys
from paged.http.cli import main
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", *sys.argv[1:]]))
"""
SIZES = ("--max-num-seqs=1", "--max-num-batched-tokens=64", "--kv-cache-memory-bytes=1m")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_of_four_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many as there are key/value heads."""
    golden = load_golden("llama")
    folder = str(write_checkpoint(tmp_path, golden))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    flags = ("--tensor-parallel-size=4", "--skip-tokenizer-init", "--compile-cache-dir=", *SIZES)
    with started(PROGRAM, folder, *flags) as running:
        body = {
            "prompt": golden["prompt"],
            "max_tokens": len(golden["greedy"]),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        reply = httpx2.post(f"{running.url}/completions", json=body, timeout=60)
    [choice] = reply.json()["choices"]
    assert choice["token_ids"] == golden["greedy"]
