"""`paged simulate` on the command line: what it prints, writes, draws and refuses."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from paged.http.cli import main
from paged.runtime.bench.options import ArrivalOptions
from paged.runtime.bench.results import BenchResult, StepTime, now, write_result
from paged.runtime.simulation.options import TraceOptions

Capture = pytest.CaptureFixture[str]
QUICK = (
    *("simulate", "--request-rate", "8", "--seconds", "10", "--num-pages", "2000"),
    *("--trace", "agents", "--disable-tqdm"),
)


def simulate(capsys: Capture, *flags: str) -> list[str]:
    assert main([*QUICK, *flags]) == 0
    return capsys.readouterr().out.splitlines()


def complaint(capsys: Capture, *flags: str) -> str:
    """The one line that a mistake gives."""
    try:
        status: object = main(["simulate", "--disable-tqdm", *flags])
    except SystemExit as stopped:  # of the parser
        status = stopped.code
    assert status == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_one_replica_more_is_simulated_and_what_it_buys_is_told(capsys: Capture) -> None:
    lines = simulate(capsys, "--goodput", "ttft:500", "tpot:30")
    assert lines[0].startswith("Steps as of one NVIDIA H200")
    table = [line.split() for line in lines if "prefix" in line]
    assert [row[0] for row in table[:2]] == ["1", "2"]
    assert lines[-1].startswith("1 -> 2 replicas (prefix): ")
    assert "goals met" in lines[-1] and "GPU hours" in lines[-1]  # noqa: PT018


def test_the_same_seed_gives_the_same_figures(capsys: Capture) -> None:
    assert simulate(capsys) == simulate(capsys)
    assert simulate(capsys, "--seed", "1") != simulate(capsys)


def test_bursts_are_as_those_of_paged_bench_and_delays_no_negative_times(capsys: Capture) -> None:
    one, other = (
        next(each for each in fields(config) if each.name == "burstiness").metadata
        for config in (TraceOptions, ArrivalOptions)
    )
    assert one == other
    for flag in ("--warmup", "--upscale-delay", "--downscale-delay", "--start-seconds"):
        told = complaint(capsys, f"{flag}=-1")
        assert f"{flag}: must be at least 0 and at most 1e+09, got -1" in told


def test_nothing_is_simulated_whose_figures_have_no_place(capsys: Capture, tmp_path: Path) -> None:
    for flag in ("--output-json", "--html"):
        assert f"written to {tmp_path}: it is a folder" in complaint(capsys, flag, str(tmp_path))
    assert not capsys.readouterr().out


def test_figures_and_a_page_are_written(capsys: Capture, tmp_path: Path) -> None:
    figures, page = tmp_path / "f.json", tmp_path / "f.html"
    flags = ("--replicas", "1-3", "--routing", "prefix,random")
    simulate(capsys, *flags, "--output-json", str(figures), "--html", str(page))
    runs = json.loads(figures.read_text())["runs"]
    assert [(run["routing"], run["replicas"]) for run in runs] == [
        (routing, size) for routing in ("prefix", "random") for size in (1, 2, 3)
    ]
    assert all(run["milliseconds"]["ttft"]["p99"] > 0 for run in runs)
    html = page.read_text()
    assert html.count("<figure>") == 4
    assert html.count("<tr>") == 1 + len(runs)
    assert "1 -&gt; 2 replicas" in html
    assert "Scaling" not in html
    assert "http" not in html  # it needs nothing else


def test_scaling_is_drawn(capsys: Capture, tmp_path: Path) -> None:
    page = tmp_path / "f.html"
    scaling = ("--max-replicas", "3", "--target-open-requests", "1", "--upscale-delay", "0")
    load = ("--start-seconds", "1", "--request-rate", "30", "--seconds", "20")
    lines = simulate(capsys, *scaling, *load, "--html", str(page))
    assert [line.split()[0][0] for line in lines if "prefix" in line] == ["~"]
    html = page.read_text()
    assert "from 1, prefix" in html
    assert html.count("<figure>") == 2


def test_a_recorded_trace_is_simulated(capsys: Capture, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [
        {"prompt": [5] * 600, "output_tokens": 10, "arrival": 0.5 * number} for number in range(8)
    ]
    trace.write_text("".join(json.dumps(each) + "\n" for each in requests))
    lines = simulate(capsys, "--trace", "file", "--trace-path", str(trace), "--seconds", "3")
    [row] = [line.split() for line in lines if line.split()[:2] == ["1", "prefix"]]
    assert (
        row[4] == f"{5 * 592 / (6 * 600):.1%}"
    )  # six in time; all but the first find its full pages


def test_steps_that_were_measured_are_used(capsys: Capture, tmp_path: Path) -> None:
    def step(tokens: int, rows: int, context: int, ms: float) -> StepTime:
        name = f"{'decode' if tokens == rows else 'mixed'}_{tokens}"
        size = {"num_tokens": tokens, "rows": rows, "context_tokens": context}
        return StepTime(bucket=name, **size, ms=ms, flops=0.0, bytes=0.0)

    steps = (step(1, 1, 100, 20.0), step(8, 8, 100, 20.0), step(64, 1, 0, 20.0))
    file = tmp_path / "steps.json"
    result = BenchResult(command="steps", date=now(), model="tiny", device="cpu", steps=steps)
    write_result(result, file)
    lines = simulate(capsys, "--step-times", str(file), "--request-rate", "0.1")
    assert lines[0].startswith("Steps as of tiny on cpu, ")
    assert complaint(capsys, "--step-times", str(file)).endswith(
        "needs --num-pages, which the engine logs at its start"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--replicas", "0"), "must be counts as 8, 1,2,4 or 1-8, of at most 100,000, got '0'"),
        (("--replicas", "3-1"), "got '3-1'"),
        (("--replicas", "1-999999999"), "of at most 100,000, got '1-999999999'"),
        (("--max-replicas", "2", "--replicas", "1-3"), "at least --replicas (3), got 2"),
        (("--seed", "-1"), "--seed: must be at least 0"),
        (("--seconds", "1e308"), "--seconds: must be at most 1e+09, got 1e308"),
        (("--seconds", "1e8", "--request-rate", "1e8"), "at most 16,777,216 are simulated"),
        (("--num-pages", "99999999999"), "--num-pages: must be at most 16,777,216"),
        (("--trace-path", "load.jsonl"), "--trace-path says nothing of --trace chat"),
        (("--routing", "prefix,best"), "knows prefix, least_loaded, random, got 'prefix,best'"),
        (("--step-times", "nobody"), "must be h200-llama-3.1-8b-bf16 or a file"),
        (("--trace", "log"), "--trace log needs --trace-path"),
        (("--seconds", "2", "--html", "/no/such/folder/a.html"), "cannot be written"),
        (("--max-replicas", "2", "--replicas", "3"), "at least --replicas (3), got 2"),
        (("--num-pages", "10"), "max_model_len 8192 takes 512 pages"),
        (("--burst-factor", "9", "--burst-seconds", "30"), "at most 6.66667 seconds"),
        (("--warmup", "100", "--seconds", "2"), "No request came after the warm-up of 100 s"),
        (("--request-rte", "1"), "did you mean --request-rate?"),
    ],
)
def test_a_mistake_is_a_line(capsys: Capture, flags: tuple[str, ...], words: str) -> None:
    assert words in complaint(capsys, *flags)


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 100_000, b"[5]", b"1" * 5000])
@pytest.mark.parametrize("flags", [("--trace", "file", "--trace-path"), ("--step-times",)])
def test_a_file_that_is_something_else_is_a_line(
    capsys: Capture, tmp_path: Path, flags: tuple[str, ...], content: bytes
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert str(file) in complaint(capsys, *flags, str(file))


def test_a_policy_that_is_named_twice_is_simulated_once(capsys: Capture) -> None:
    lines = simulate(capsys, "--routing", "prefix,prefix", "--replicas", "1,2")
    assert sum(line.split()[1:2] == ["prefix"] for line in lines) == 2


def test_no_device_is_touched() -> None:
    command = f"from paged.http.cli import main; main({[*QUICK]})"
    code = f"import sys; {command}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
