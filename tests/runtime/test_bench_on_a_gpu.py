"""`benchmarks/on_a_gpu.py`: stages have their time, their folder, and an end, whatever they do."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from benchmarks import offline_baselines, on_a_gpu
from benchmarks.on_a_gpu import ROOT, STAGES, Stage
from paged.runtime.core import EngineCore
from tests.runtime.fakes import FakeCore
from tests.runtime.remote import is_gone, wait_until


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_a_gpu, "num_gpus", lambda: 1)


def stage(name: str, code: str, seconds: int = 60, num_gpus: int = 1) -> Stage:
    return Stage(name, seconds, ("-c", code, "OUT"), num_gpus)


def test_stages_run_in_order_and_are_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = "import sys, pathlib; pathlib.Path(sys.argv[1], 'made').touch(); print('said')"
    stages = (stage("good", write), stage("bad", "exit(3)"), stage("wide", write, num_gpus=2))
    monkeypatch.setattr(on_a_gpu, "STAGES", stages)
    monkeypatch.setattr(sys, "argv", ["on_a_gpu.py", f"--out={tmp_path}"])
    assert on_a_gpu.main() == 1
    found = [
        (it["name"], it["result"]) for it in json.loads((tmp_path / "summary.json").read_text())
    ]
    left_out = "left out: needs 2 GPUs, found 1"
    assert found == [("good", "passed"), ("bad", "failed"), ("wide", left_out)]
    assert (tmp_path / "good.log").read_text() == "said\n"
    assert (tmp_path / "good" / "made").exists()


def test_a_stage_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def its_time_is_over(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        assert timeout == 3
        wait_until((tmp_path / "long.log").read_text)
        raise subprocess.TimeoutExpired("long", timeout)

    wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", its_time_is_over)
    code = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\n"
        "time.sleep(600)"
    )
    outcome = on_a_gpu.run(stage("long", code, seconds=3), tmp_path, 600)
    assert outcome.result == "ended"
    child = int((tmp_path / "long.log").read_text())
    try:
        wait_until(lambda: is_gone(child))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_what_time_does_not_hold_is_left_out(tmp_path: Path) -> None:
    assert on_a_gpu.run(stage("late", ""), tmp_path, 12).result == "left out: 12 s are left"


def test_unknown_stages_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_a_gpu.py", "--only=goldens,nowhere", "--list"])
    with pytest.raises(SystemExit):
        on_a_gpu.main()
    assert "no stage nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("each", STAGES, ids=lambda each: each.name)
def test_what_stages_name_is_there(each: Stage) -> None:
    program, *args = each.args
    if program == "-m":
        return
    sources = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    assert (ROOT / program).is_file()
    for arg in args:
        assert not arg.startswith("--") or f'"{arg}"' in sources
        assert not arg.startswith("benchmarks/") or (ROOT / arg / "config.json").is_file()


def test_throughput_by_concurrency_keeps_as_many_open() -> None:
    core = FakeCore()
    open_at_steps: list[int] = []
    core.on_step = lambda: open_at_steps.append(len(core.live))
    found = offline_baselines.at_concurrency(cast(EngineCore, core), 3, 512)
    assert found["streams"] == max(open_at_steps) == 3
    per_request = found["output_tokens_per_second"] / found["requests_per_second"]
    assert per_request == pytest.approx(128, rel=0.01)
