"""`paged bench prefix` and `paged bench mixed` on a tiny model, and what they send."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from paged.http.cli import main
from paged.runtime.bench.mixed import ALONE, mixed_requests, tail_table
from paged.runtime.bench.options import POLICIES, MixedOptions
from paged.runtime.bench.prefix import prefix_lines
from paged.runtime.bench.results import BenchResult, RunResult, now, read_result
from paged.runtime.bench.workloads import IdRange, prefix_tree_requests
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import choices_of

Bench = Callable[..., None]
TREE: dict[str, Any] = {
    "depth": 2,
    "branching": 2,
    "level_len": 5,
    "suffix_len": 3,
    "output_len": 4,
}


def prompts(number: int, seed: int) -> list[tuple[int, ...]]:
    requests = prefix_tree_requests(number, seed=seed, ids=IdRange(), **TREE)
    assert {(each.num_input_tokens, each.num_output_tokens) for each in requests} == {(13, 4)}
    return [tuple(each.prompt) for each in requests if isinstance(each.prompt, list)]


def test_a_tree_shares_its_levels() -> None:
    found = prompts(40, 0)
    assert len({prompt[:5] for prompt in found}) == 2
    assert len({prompt[:10] for prompt in found}) == 4
    assert len(set(found)) == 40
    assert found == prompts(40, 0)
    assert not set(found) & set(prompts(40, 1))


def test_a_tree_needs_numbers() -> None:
    with pytest.raises(ConfigError, match=r"at least 1, got .*'branching': 0"):
        prefix_tree_requests(1, seed=0, ids=IdRange(), **TREE | {"branching": 0})


def test_short_and_long_requests_are_mixed() -> None:
    options = MixedOptions(num_short=20, num_long=5, long_input_len=300, arrival_seconds=4)
    requests = mixed_requests(options, seed=0, ids=IdRange())
    arrivals = [each.arrival for each in requests]
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] < arrivals[-1] <= 4
    kinds = [(each.kind, each.priority, each.num_input_tokens) for each in requests]
    assert sorted(set(kinds)) == [("long", 1, 300), ("short", 0, 128)]
    assert kinds.count(("long", 1, 300)) == 5
    assert requests == mixed_requests(options, seed=0, ids=IdRange())


def test_every_policy_is_tried() -> None:
    assert choices_of(get_type_hints(EngineConfig)["scheduling_policy"]) == POLICIES


def test_prefix_compares_without_and_with_a_cache(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "prefix.json", tmp_path / "prefix.html"
    sizes = ["--prefix-tree-level-len=32", "--prefix-tree-suffix-len=8", "--output-len=3"]
    files = ["--output-json", path, "--html", page]
    bench("prefix", "--num-prompts=12", *sizes, "--goodput", "ttft:60000", *files)
    off, on = read_result(path).runs
    assert off.engine is not None
    assert on.engine is not None
    assert off.engine.prefix_hit_rate == 0 < 0.3 < on.engine.prefix_hit_rate
    assert off.num_input_tokens == on.num_input_tokens == 12 * (3 * 32 + 8)
    assert on.goodput == on.requests_per_second
    assert "of prompt tokens were cached, TTFT P50 went from" in capsys.readouterr().out
    assert "prefix caching off" in page.read_text()


def test_mixed_tells_the_tail_of_short_requests(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mixed.json"
    numbers = ["--num-short=4", "--num-long=1", "--long-input-len=300", "--short-input-len=16"]
    more = ["--short-output-len=3", "--arrival-seconds=0", "--policies", "fcfs", "lanes"]
    bench("mixed", *numbers, *more, "--output-json", path)
    runs = read_result(path).runs
    assert [run.name for run in runs] == [ALONE, "fcfs", "lanes"]
    assert [sorted(run.kinds) for run in runs] == [["short"], *[["long", "short"]] * 2]
    assert runs[2].settings == {"scheduling_policy": "lanes", "long_prompt_threshold": 299}
    table = tail_table(runs)
    assert [row[0] for row in table.rows] == [ALONE, "fcfs", "lanes"]
    assert table.rows[0][2::2] == ("1.00", "1.00")
    assert tokens_per_second(runs[1]) == pytest.approx(
        float(table.rows[1][-1].replace(",", "")), abs=0.5
    )
    assert "Short requests" in capsys.readouterr().out


def failed(name: str, num_failed: int = 3) -> RunResult:
    """A run without a request that was answered."""
    counts = {"num_completed": 0, "num_failed": num_failed, "num_input_tokens": 0}
    rates = {"requests_per_second": 0.0, "output_tokens_per_second": 0.0}
    rest = {"duration": 1.0, "num_output_tokens": 0, "total_tokens_per_second": 0.0}
    return RunResult(name=name, **counts, **rates, **rest)  # type: ignore[arg-type]


def test_runs_in_which_nothing_was_answered_are_told() -> None:
    table = tail_table((failed(ALONE), failed("fcfs")))
    assert [row[1:] for row in table.rows] == [("-",) * 4 + ("",), ("-",) * 4 + ("0",)]
    assert [*prefix_lines((failed("off"), failed("on")))][-1] == (
        "With prefix caching 0.0% of prompt tokens were cached."
    )


@pytest.mark.parametrize("command", ["prefix", "mixed"])
@pytest.mark.parametrize("num_failed", [0, 1])
def test_a_run_with_a_failed_request_is_told_by_the_exit_status(
    command: str, num_failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(f"paged.runtime.bench.{command}")
    runs = tuple(failed(name, num_failed if name == "b" else 0) for name in "ab")
    result = BenchResult(command=command, date=now(), model="m", runs=runs)
    monkeypatch.setattr(module, "measure", lambda *args, **how: result)
    assert main(["bench", command]) == num_failed


def tokens_per_second(run: RunResult) -> float:
    """Of the one long request."""
    [long] = [each for each in run.requests if each.kind == "long"]
    return (long.num_input_tokens + long.num_output_tokens) / long.e2el
