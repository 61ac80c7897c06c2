"""`paged convert`, and an engine on what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged.models.loading.source import embedded_model


def run_paged(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paged.http", *argv]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_a_converted_model_answers_as_the_other(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = run_paged("convert", str(embedded_model()), out, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "Wrote" in line]
    assert line.startswith("INFO ")
    assert "0.54 GB in float32" in line
    asked = ("--prompt", "The capital of France is", "--temperature=0", "--max-tokens=8")
    limits = ("--max-model-len=128", "--max-num-seqs=1", "--compile-cache-dir", str(tmp_path / "c"))
    before, after = (run_paged("generate", *model, *asked, *limits) for model in ((), (out,)))
    assert before.returncode == 0, before.stderr
    assert after.returncode == 0, after.stderr
    assert "Paris" in after.stdout
    assert after.stdout == before.stdout


def test_mistakes_are_told_in_a_line(tmp_path: Path) -> None:
    done = run_paged("convert", str(embedded_model()), str(tmp_path))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"paged: error: {tmp_path} exists")
