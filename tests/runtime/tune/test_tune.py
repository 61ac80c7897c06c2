"""`paged tune` with a tiny model, and the folder that it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged.http.cli import main, parse
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError, EngineDead
from paged.runtime.tune.journal import NAME, Journal, Task, kept_alone
from paged.runtime.tune.report import PAGE, Findings, as_flags, summary
from paged.runtime.tune.search import Search, Trial, Verdict
from tests.runtime.bench.conftest import MODEL
from tests.runtime.conftest import compile_few
from tests.runtime.fakes import write_model

SMALL = MODEL | {"num_hidden_layers": 1, "max_position_embeddings": 256}
REQUESTS = [{"input_tokens": 20 + each, "output_tokens": 4} for each in range(6)]

Tune = Callable[..., int]


@pytest.fixture(scope="session")
def tune(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Tune:
    """Runs `paged tune` on the requests, in a folder."""
    model = write_model(tmp_path_factory.mktemp("tiny"), SMALL)
    workload = tmp_path_factory.mktemp("load") / "requests.jsonl"
    workload.write_text("".join(json.dumps(each) + "\n" for each in REQUESTS))
    flags = ("--load-format=dummy", "--kv-cache-memory-bytes=1M", "--max-num-seqs=2")
    more = ("--max-num-batched-tokens=32", f"--compile-cache-dir={compile_cache}", "--disable-tqdm")

    def run(folder: Path, *argv: str) -> int:
        known = ("tune", str(model), *flags, *more, f"--workload={workload}")
        with pytest.MonkeyPatch.context() as patch:
            compile_few(patch)
            # On a busy machine the second run may take half as long as the first.
            patch.setattr(Search, "_seems_better", lambda *args: False)
            return main([*known, f"--output-dir={folder}", *argv])

    return run


@pytest.fixture(scope="session")
def folder(tune: Tune, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tune that was cut short."""
    folder = tmp_path_factory.mktemp("tuning")
    assert tune(folder, "--max-runs=3", "--slo=ttft=60s,tpot=10s", "--margin=0.99") == 0
    return folder


def test_the_flags_are_a_file_that_serve_reads(folder: Path) -> None:
    args = parse(["serve", "--config", str(folder / "flags.yaml")])
    assert (args.max_num_seqs, args.max_num_batched_tokens) == (2, 32)
    assert args.kv_cache_memory_bytes == 2**20
    assert Path(args.model, "config.json").exists()


def test_every_run_is_kept(folder: Path) -> None:
    header, *lines = map(json.loads, (folder / NAME).read_text().splitlines())
    assert header["task"]["goals"] == {"ttft": 60_000, "tpot": 10_000}
    assert header["start"]["device"] == "CPU"
    assert header["start"]["values"]["max_model_len"] == 256
    assert header["start"]["facts"]["longest"] == 25 + 4
    assert [line.get("lever", "") for line in lines] == ["", "", "memory for pages"]
    assert all(line["run"]["num_completed"] == len(REQUESTS) for line in lines)
    assert all(line["run"]["goodput"] > 0 for line in lines)


def test_the_page_shows_every_trial(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert page.count("<tr>") == 1 + 2  # the head, the baseline and the one turn that was taken
    assert "requests/s within goals" in page
    assert "P99 of time per output token" in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing from outside


def test_it_goes_on_where_it_was(
    tune: Tune, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **how: Any) -> None:
        raise AssertionError("what has run must not run again")

    monkeypatch.setattr(AsyncEngine, "from_config", refuse)
    before = (folder / NAME).read_bytes()
    # A stop in the middle of a line loses the line alone.
    (folder / NAME).write_bytes(before + b'{"values": {"max_mo')
    assert tune(folder, "--max-runs=3", "--slo=ttft=60s,tpot=10s", "--margin=0.99") == 0
    assert (folder / NAME).read_bytes() == before
    told = capsys.readouterr().out
    assert told.startswith("baseline: the flags given: ")
    assert "requests/s within the goals" in told
    assert "a larger --max-runs goes on" in told


@pytest.mark.parametrize(
    ("error", "again"),
    [(EngineDead("ended by signal 9"), 1), (ConfigError("no room"), 0)],
    ids=["killed", "no room"],
)
def test_only_what_an_accident_ended_is_tried_again(
    tune: Tune,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    again: int,
) -> None:
    starts: list[Any] = []

    def fail(*args: Any, **how: Any) -> None:
        starts.append(args)
        raise error

    monkeypatch.setattr(AsyncEngine, "from_config", fail)
    (tmp_path / NAME).write_bytes((folder / NAME).read_bytes())
    for expected in (1, 1 + again):
        assert tune(tmp_path, "--max-runs=4", "--slo=ttft=60s,tpot=10s", "--margin=0.99") == 0
        assert len(starts) == expected
        assert f"sequences in a step: --max-num-seqs 4: failed, {error}" in capsys.readouterr().out


def test_nothing_is_tried_whose_outcome_has_no_place(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / PAGE).mkdir()
    assert tune(tmp_path) == 2
    assert f"{PAGE}: it is a folder" in capsys.readouterr().err
    assert (tmp_path / NAME).read_bytes() == b""


def test_a_folder_is_of_one_task(
    tune: Tune, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(folder, "--slo=ttft=1s") == 2
    assert "goals: {'ttft': 60000.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["tune"], "paged tune needs --workload FILE"),
        (["tune", "--workload=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_mistakes_are_a_line(
    argv: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, f"--output-dir={tmp_path}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_flags_are_told_as_a_shell_takes_them() -> None:
    values = {
        "quantization_exclude": ("*head*", "router"),
        "override_generation_config": {"top_k": 5},
        "compile_cache_dir": "",
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
    }
    assert as_flags(values) == (
        "--quantization-exclude '*head*' router "
        """--override-generation-config '{"top_k": 5}' --compile-cache-dir '' """
        "--no-enable-prefix-caching --max-num-seqs 8"
    )


def test_what_costs_precision_is_named_once() -> None:
    baseline = {"kv_cache_dtype": "auto"}
    tried = [Trial({"kv_cache_dtype": name}, "KV cache of 8 bits") for name in ("fp8", "int8")]
    verdicts = [Verdict(trial, 0.1, is_kept=True) for trial in (Trial(baseline), *tried)]
    findings = Findings(
        config=EngineConfig(max_num_seqs=8),
        model=None,
        device="CPU",
        goals={},
        baseline=baseline,
        verdicts=tuple(verdicts),
    )
    first, *_, costs, _ = summary(findings, "tuning")
    assert first == "Best: paged serve --max-num-seqs 8 --kv-cache-dtype int8"
    assert costs.startswith("Answers change by KV cache of 8 bits: ")


@pytest.mark.slow
def test_a_baseline_that_cannot_serve_the_workload(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path, "--max-model-len=16") == 1
    [*_, line] = capsys.readouterr().err.splitlines()
    assert line.startswith("paged: error: the baseline fails: 6 of 6 requests failed")


def test_a_folder_is_of_one_process(
    tune: Tune, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / NAME).read_bytes()
    with kept_alone(folder):
        assert tune(folder, "--max-runs=3", "--slo=ttft=60s,tpot=10s", "--margin=0.99") == 2
    assert "another `paged tune` is at work there" in capsys.readouterr().err
    assert (folder / NAME).read_bytes() == before
    with kept_alone(folder):  # it is free again
        pass


def test_a_folder_that_is_a_file(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert tune(tmp_path / "file") == 2
    assert "file: File exists" in capsys.readouterr().err


def test_a_seed_that_draws_nothing(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path, "--seed=-1") == 2
    assert "--seed is of prompts here, too, and must be at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a shopping list\n", "a shopping list", "{}\n"])
def test_a_journal_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ConfigError, match=r"no journal of `paged tune`"):
        Journal(tmp_path, Task(None, {}, "", {}))
    assert (tmp_path / NAME).read_text() == text


def test_a_journal_that_was_cut_in_its_first_line_begins_anew(tmp_path: Path) -> None:
    """As a full disk leaves it."""
    (tmp_path / NAME).write_bytes(b'{"task":{"model":"mod')
    assert Journal(tmp_path, Task(None, {}, "", {})).start is None
    assert (tmp_path / NAME).read_bytes() == b""
