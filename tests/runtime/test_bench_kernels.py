"""The benchmarks of kernels, as far as they go without a GPU: a clock stands in for its own."""

from collections.abc import Callable

import pytest

from benchmarks import tune_matmul
from benchmarks.gpu import Kernels, median_microseconds
from benchmarks.step_kernels import RUNS, Case, by_name
from paged.runtime.buckets import Bucket, Buckets


def test_a_case_takes_the_smallest_shape_that_holds_it() -> None:
    buckets = Buckets.make(1024, 8192)
    assert Case.parse("decode:100x50").bucket(buckets) == Bucket(128, 128, True)
    assert Case.parse("mixed:2x50+3x40").bucket(buckets) == Bucket(192, 192, False)
    with pytest.raises(SystemExit, match="not a case: 'decode:8'"):
        Case.parse("decode:8")


def test_a_case_is_the_work_of_its_rows_and_chunks() -> None:
    *decoding, prompt = Case.parse("mixed:2x50+1x40").requests
    assert [(each.prompt, each.cached, each.outputs) for each in decoding] == [(50, 50, 2)] * 2
    assert (prompt.prompt, prompt.cached, prompt.outputs) == (40, 0, 1)


def test_kernels_are_summed_by_name_and_told_of_one_step() -> None:
    found: Kernels = [("short", 1.0), ("long", 5.0), ("short", 3.0)] * RUNS
    assert by_name(found) == [("long", 5.0, 1), ("short", 4.0, 2)]


def test_medians_are_of_whole_runs() -> None:
    runs: list[Kernels] = [[("paged_a", 1.0), ("b", 2.0)], [("paged_a", 3.0)], [("b", 9.0)]]
    assert median_microseconds(runs) == 3000
    assert median_microseconds(runs, "paged") == 1000


def test_each_program_is_given_the_kernels_after_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: Kernels = []
    monkeypatch.setattr(tune_matmul, "mark", lambda number: launched.append(("sine", 0.1)))

    def kernels(run: Callable[[], object]) -> Kernels:
        launched.clear()
        run()
        return launched

    monkeypatch.setattr(tune_matmul, "kernels", kernels)
    runs = [lambda: launched.append(("fast", 1.0)), lambda: launched.append(("slow", 2.0))]
    assert tune_matmul.timed([*runs], guess=9, calls=2) == [500, 1000]
