"""Results as tables, plots, pages and comparisons; and what a server's metrics say."""

import math
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paged.http.cli import main
from paged.runtime.bench.compare import compare_tables
from paged.runtime.bench.html_report import html_report, named_runs
from paged.runtime.bench.metrics import RequestRecord, ServeSummary
from paged.runtime.bench.plots import (
    HEIGHT,
    WIDTH,
    Axis,
    Series,
    linear_ticks,
    log_ticks,
    plot,
    short,
)
from paged.runtime.bench.publish import check_writable
from paged.runtime.bench.results import (
    BenchResult,
    Ceilings,
    RunResult,
    StepTime,
    write_result,
)
from paged.runtime.bench.run_results import run_result
from paged.runtime.bench.server_metrics import ServerMetrics, metric_lines
from paged.runtime.bench.tables import Table, run_lines, throughput_table
from tests.runtime.benchmark import ROOT


def a_run(name: str, slower: float = 1.0) -> RunResult:
    """Ten requests of three tokens, one after the other."""
    records = [
        RequestRecord(
            start=float(number),
            num_input_tokens=8,
            num_output_tokens=3,
            chunk_times=[number + each * slower for each in (0.1, 0.2, 0.4)],
            kind="odd" if number % 2 else "even",
        )
        for number in range(10)
    ]
    return run_result(ServeSummary(records, 10.0, (("ttft", 150.0),)), name)


def a_result(*runs: RunResult, label: str = "") -> BenchResult:
    date = "2026-01-01T00:00:00+00:00"
    return BenchResult(command="serve", date=date, model="a <b> model", label=label, runs=runs)


STEPS = tuple(
    StepTime(bucket=f"decode_{n}", num_tokens=n, rows=n, context_tokens=8, ms=n, flops=9, bytes=9)
    for n in (1, 2, 4)
)


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", page)]


@pytest.mark.parametrize("command", ["serve", "steps", "prefix", "mixed", "latency", "profile"])
def test_a_run_whose_results_have_no_place_is_not_begun(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No engine starts and no server is looked for, which these would tell of."""
    file = "--output-json" if command == "profile" else "--html"
    flags = ["--host=nowhere.invalid"] if command == "serve" else ["/nowhere"]
    for path, told in ((tmp_path / "no" / "file", "there is no folder"), (tmp_path, "a folder")):
        assert main(["bench", command, *flags, file, str(path)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"cannot be written to {path}: " in line
        assert told in line


def test_a_place_for_results_is_left_as_it_was(tmp_path: Path) -> None:
    there = tmp_path / "old"
    there.write_text("older results")
    check_writable(there, tmp_path / "new", None)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["older results"]


def test_serve_makes_the_folder_of_its_results_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = f"--result-dir={tmp_path / 'file'}"
    assert main(["bench", "serve", "--host=nowhere.invalid", "--save-result", folder]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--result-dir: " in line


def test_a_table_stands_in_columns() -> None:
    table = Table("T", ("run", "ms"), (("a", "1.0"), ("longer", "123.0")))
    assert list(table.lines()) == ["T", "run        ms", "a         1.0", "longer  123.0"]


def test_tables_of_runs() -> None:
    run = a_run("one")
    [row] = throughput_table([("one", run)]).rows
    assert row == ("one", "10", "0", "10.00", "1.00", "3.0", "11.0", "1.00")
    lines = list(run_lines([run]))
    assert "Time to first token (TTFT), ms" in lines
    assert any(re.fullmatch(r"one, even +100.00( +100.00){4}", line) for line in lines)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.05, "0.05"), (999, "999"), (12_300, "12.3k"), (2e12, "2T")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_ticks_are_round() -> None:
    assert linear_ticks(10) == [0, 2, 4, 6, 8, 10]
    assert linear_ticks(4) == [0, 1, 2, 3, 4]
    assert linear_ticks(3000) == [0, 1000, 2000, 3000]
    assert log_ticks(1, 100) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(1, 1e6) == [1, 10, 100, 1e3, 1e4, 1e5, 1e6]


@pytest.mark.parametrize("log", [False, True])
def test_a_plot_stays_in_its_frame(log: bool) -> None:
    series = Series("a & b", [0.0, 1, 30, 1e4], [5.0, math.nan, 0.02, 7e6], 7, dots=True)
    drawn = plot("T <1>", [series], Axis("x", log), Axis("y", log))
    [svg] = svgs(drawn)
    points = [
        tuple(map(float, each.split(",")))
        for each in drawn.split('points="')[1].split('"')[0].split()
    ]
    assert len(points) == (2 if log else 3)  # 0 has no logarithm, and NaN no place
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert "T &lt;1&gt;" in drawn
    assert 'class="s1"' in drawn  # styles repeat
    assert next(svg.iter("title")).text is not None


def test_nothing_to_draw_is_no_plot() -> None:
    assert plot("T", [Series("a", [0.0], [1.0], 0)], Axis("x", log=True), Axis("y")) == ""


def test_a_page_needs_nothing_else() -> None:
    runs = [a_run("one"), a_run("two", 1.5), a_run("<three>", 2.0)]
    page = html_report([("", a_result(*runs))])
    assert not re.search(r"<script|https?://|src=|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page
    assert "a &lt;b&gt; model" in page
    assert "<three>" not in page
    assert "Throughput against latency" in page
    assert "Of odd requests" in page
    assert len(svgs(page)) > 10


def test_a_page_of_steps() -> None:
    ceilings = Ceilings(1e9, 2e9)
    result = replace(a_result(), command="steps", steps=STEPS, ceilings=ceilings)
    page = html_report([("", result)])
    assert "reads 1.0 GB/s and multiplies 2.0 GFLOP/s" in page
    assert "Time of a step, decode" in page
    assert "Time of a step, mixed" not in page


def test_runs_of_several_results_keep_apart() -> None:
    one, more = a_result(a_run("x")), a_result(a_run("x"), a_run("y"))
    assert [name for name, _ in named_runs([("A", one), ("B", more)])] == ["A", "B: x", "B: y"]
    assert [name for name, _ in named_runs([("", more)])] == ["x", "y"]


def test_a_comparison_tells_the_change() -> None:
    names = ("A", "B")
    [table] = compare_tables(names, a_result(a_run("x")), a_result(a_run("y", 1.5)))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["TTFT P99, ms"] == ("100.00", "150.00", "+50.0%")
    assert rows["output tokens/s"] == ("3.00", "3.00", "+0.0%")
    assert rows["failed requests"] == ("0", "0", "")
    assert "QUEUE mean, ms" not in rows
    several = a_result(a_run("x"), a_run("z"))
    assert [each.title for each in compare_tables(names, several, several)] == ["x", "z"]
    slower = tuple(replace(step, ms=2 * step.ms) for step in STEPS[:2])
    [steps] = compare_tables(
        names, replace(a_result(), steps=STEPS), replace(a_result(), steps=slower)
    )
    assert [row[-1] for row in steps.rows] == ["+100.0%"] * 2


def test_compare_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, page = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.html"
    write_result(a_result(a_run("serve")), before)
    write_result(a_result(a_run("serve", 1.5), label="slower"), after)
    assert main(["bench", "--compare", str(before), str(after), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"figure +a +slower +change", printed)
    assert re.search(r"E2EL mean, ms +400.00 +600.00 +\+50.0%", printed)
    assert page.read_text().count("<polyline") > 4


def test_results_that_have_nothing_in_common(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, steps = tmp_path / "runs.json", tmp_path / "steps.json"
    write_result(a_result(a_run("x"), a_run("y")), runs)
    write_result(replace(a_result(), steps=STEPS), steps)
    assert main(["bench", "--compare", str(runs), str(steps)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Nothing can be compared: runs is of " in captured.err
    assert "with 0 steps and the runs x, y" in captured.err


def test_a_trace_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told before an engine starts."""
    (tmp_path / "file").touch()
    assert main(["bench", "profile", "--trace-dir", str(tmp_path / "file")]) == 2
    assert "file: File exists" in capsys.readouterr().err


def test_bench_alone_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "throughput|latency|profile|steps|serve|prefix|mixed" in capsys.readouterr().err
    assert main(["bench", "--compare", "/nowhere", "/nowhere"]) == 2
    assert "/nowhere is no result of `paged bench`" in capsys.readouterr().err
    for flags in (["--compare", "/nowhere", "/nowhere"], ["--html", "/nowhere/page.html"]):
        assert main(["bench", *flags, "serve"]) == 2
        assert "leave them out, or serve" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["serving", "latency", "throughput"])
def test_the_old_names_of_vllm_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    program = f"benchmarks/benchmark_{name}.py"
    monkeypatch.setattr(sys, "argv", [program, "--num-prompt", "3"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / program), run_name="__main__")
    assert "unknown flag --num-prompt" in capsys.readouterr().err


METRICS = """# HELP vllm:request_queue_time_seconds x
vllm:request_queue_time_seconds_bucket{model="m",le="0.1"} %d
vllm:request_queue_time_seconds_bucket{model="m",le="0.3"} %d
vllm:request_queue_time_seconds_bucket{model="m",le="+Inf"} %d
vllm:request_queue_time_seconds_count{model="m"} %d
vllm:request_queue_time_seconds_sum{model="m"} %f
vllm:prefix_cache_queries_total{engine="0"} %d
vllm:prefix_cache_hits_total{engine="0"} %d
other 1
"""


def test_what_a_servers_metrics_grew_by() -> None:
    before = ServerMetrics.parse(METRICS % (1, 1, 1, 1, 0.05, 100, 0))
    after = ServerMetrics.parse(METRICS % (11, 21, 21, 21, 3.05, 300, 50))
    grown = after.since(before)
    assert grown.prefix_hit_rate == 0.25
    times = grown.queue_times
    assert times is not None
    assert (times.count, times.mean) == (20, 150.0)
    assert (times.p50, times.curve[75], times.curve[100]) == (100.0, 200.0, 300.0)
    told = "prefix cache hits 25.0%, queue time mean 150.0 ms, at most 100 for half"
    assert told in "".join(metric_lines(grown))


def test_a_server_without_metrics_tells_nothing() -> None:
    nothing = ServerMetrics.parse("<html>").since(ServerMetrics())
    assert (nothing.prefix_hit_rate, nothing.queue_times) == (None, None)
    assert list(metric_lines(nothing)) == []
