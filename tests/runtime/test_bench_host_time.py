"""`benchmarks/host_time.py`: the stopwatch, and a run on a tiny model."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks import host_time
from benchmarks.host_time import Stopwatch
from tests.runtime.benchmark import run_benchmark
from tests.runtime.clock import Clock


def test_a_part_is_timed_without_the_parts_within(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(host_time, "time", clock)
    watch = Stopwatch()
    inner = watch.timed("inner", partial(clock.sleep, 0.02))
    own = partial(clock.sleep, 0.005)
    outer = watch.timed("outer", lambda: [part() for part in (inner, own, inner)])
    for _ in range(3):
        outer()
    medians = watch.medians()
    assert len(watch.steps) == 3
    assert medians == pytest.approx({"inner": 40_000, "outer": 5_000})


def test_a_part_that_raises_is_timed_too() -> None:
    watch = Stopwatch()

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        watch.timed("failing", fail)()
    assert watch.medians().keys() == {"failing"}
    watch.timed("next", lambda: None)()
    assert len(watch.steps) == 2


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.slow), ("--no-device",)])
def test_every_part_of_a_step_is_told(tmp_path: Path, more: tuple[str, ...]) -> None:
    limits = ("--max-model-len=2048", "--max-num-seqs=4", "--max-num-batched-tokens=256")
    flags = ("--batches=4", f"--json={tmp_path}/host.json", *limits, *more)
    run_benchmark("host_time", tmp_path, *flags)
    [result] = json.loads((tmp_path / "host.json").read_text())
    parts = {"schedule", "pack", "dispatch forward", "dispatch sample", "update"}
    assert parts < result["parts"].keys()
    assert all(microseconds > 0 for microseconds in result["parts"].values())
    assert result["host"] < sum(result["parts"].values())
