"""`paged bench profile`: what a trace says of a step adds up, also on a CPU."""

import json
from pathlib import Path

import pytest

from paged.http.cli import parse
from paged.runtime.bench.step_profile import _Event, own_times, run_profile
from paged.runtime.errors import ConfigError
from tests.runtime.test_core import MODEL

FLAGS = [
    *("--load-format", "dummy", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"),
    *("--kv-cache-memory-bytes", "1M", "--compile-cache-dir", "", "--disable-tqdm"),
    *("--batch-size", "4", "--input-len", "20"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def test_what_runs_within_another_is_counted_once() -> None:
    events = [
        _Event(0, 100, "whole", ""),
        _Event(10, 40, "part", ""),
        _Event(20, 30, "inner", ""),
        _Event(40, 50, "part", ""),
        _Event(100, 101, "next", ""),
    ]
    found = [(event.name, spent) for event, spent in own_times(events[::-1])]
    assert sorted(found) == [("inner", 10), ("next", 1), ("part", 10), ("part", 20), ("whole", 60)]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_steps_of_an_engine(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], phase: str
) -> None:
    output = tmp_path / "report.json"
    flags = ["--phase", phase, "--num-steps", "6", "--output-json", str(output), "--top", "3"]
    trace = ["--trace-dir", str(tmp_path / "trace")]
    args = parse(["bench", "profile", str(model), *FLAGS, *flags, *trace])
    assert run_profile(args) == 0
    found = json.loads(output.read_text())
    assert found["num_steps"] == 6 if phase == "decode" else found["num_steps"] >= 3
    assert found["num_tokens"] == 24 if phase == "decode" else found["num_tokens"] >= 80
    assert 0 < found["host_ms"] < found["step_ms"]
    kernels = found["kernels"]
    assert sum(each["ms"] for each in kernels) == pytest.approx(found["kernel_ms"])
    assert [each["ms"] for each in kernels] == sorted(each["ms"] for each in kernels)[::-1]
    assert any("forward" in each["program"] for each in kernels)
    assert any("sample" in each["program"] for each in kernels)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 + 1
    assert lines[-1].endswith(f"{len(kernels) - 3} more")
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_a_batch_that_is_too_long(model: Path) -> None:
    args = parse(["bench", "profile", str(model), *FLAGS, "--input-len", "250"])
    with pytest.raises(ConfigError, match="--input-len 250 and 23 tokens after it are more"):
        run_profile(args)
