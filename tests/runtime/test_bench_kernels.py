"""The benchmarks of kernels, as far as they go without a GPU: a clock stands in for its own."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import tune_attention, tune_matmul, tune_narrow
from benchmarks.gpu import Kernels, median_microseconds
from benchmarks.step_kernels import RUNS, Case, by_name
from benchmarks.tables import with_products
from paged.attention.tiling import MosaicDecode, MosaicPrefill, Tilings, TritonDecode
from paged.attention.tuning.workloads import Case as Steps
from paged.attention.tuning.workloads import cases
from paged.matmul.tiling import Tiling
from paged.matmul.tuned import GROUPED, TUNED
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


@pytest.mark.parametrize("form", tune_narrow.FORMATS)
@pytest.mark.parametrize("shape", ["gated:256:128", "residual:512:128", "plain:256:192"])
def test_products_of_narrow_weights_are_those_of_a_model(form: str, shape: str) -> None:
    narrow = tune_narrow.Narrow(tune_matmul.Case.parse(shape, 8), form)
    x, of_rows, weights, of_columns, added = narrow.inputs()
    assert len(weights) == narrow.calls
    how = narrow.candidates(1)[0]
    one = partial(tune_narrow.product, narrow, how)
    out = jax.eval_shape(one, x, of_rows, weights[0], of_columns, added)
    assert {each.shape for each in jax.tree.leaves(out)} == {(8, narrow.case.n)}
    written: dict[str, Any] = {}
    exec(tune_narrow.table(form, {narrow: [(1.0, how)]}), written)
    kind = jax.devices()[0].device_kind
    tables = [written[name] for name in ("SCALED", "NARROW_INT4", "NARROW_FP8")]
    assert sum(((8, how),) in table.get(kind, {}).values() for table in tables) == 1


def test_the_table_that_is_written_is_the_table() -> None:
    few = Tilings(
        ((1, TritonDecode(64, warps=2)), (256, MosaicDecode())), ((8192, MosaicPrefill(64)),)
    )
    table = {"NVIDIA H200": {(128, 4, 16, "bfloat16"): few, (64, 8, 16, "int8"): Tilings()}}
    written: dict[str, object] = {}
    text = tune_attention.source(table)
    exec(text, written)
    assert written["TUNED"] == table
    assert text.startswith('"""What was measured')
    assert tune_attention.source({}).rstrip().endswith("= {\n}")


def test_a_table_leaves_the_others_as_they_are() -> None:
    tilings = ((8, Tiling(row_warpgroups=1)), (64, Tiling()))
    few = {"NVIDIA H200": {(True, 128, 2048, 768): tilings}}
    written: dict[str, object] = {}
    exec(with_products("GROUPED", few), written)
    assert (written["TUNED"], written["GROUPED"]) == (TUNED, few)
    text = with_products("TUNED", {"NVIDIA H100": {(False, 64, 128): ((1, None), *tilings)}})
    exec(text, written)
    assert written["TUNED"] == {"NVIDIA H100": {(False, 64, 128): ((1, None), *tilings)}}
    assert written["GROUPED"] == GROUPED
    with pytest.raises(ValueError, match="no table OTHER"):
        with_products("OTHER", {})


def test_heads_to_tune_are_read_as_they_are_typed() -> None:
    layer = tune_attention.Shape.parse("32:8:128:fp8").layer(16, "mosaic")
    assert layer.heads.key == (128, 4, 16, "float8_e4m3fn")
    for text in ("32:8", "32:8:128:fp9", "30:8:128", "a:b:c"):
        with pytest.raises(SystemExit, match=f"not a shape: '{text}'"):
            tune_attention.Shape.parse(text)


def test_tilings_are_told_from_the_fastest_to_the_slowest() -> None:
    layer = tune_attention.Shape.parse("32:8:128").layer(16, "triton")
    case = cases(1, 1, 1024)[0]
    slow, fast = case.candidates(layer)[:2]
    line = tune_attention.summary(layer, case, {slow: (20.0,), fast: (10.0,)})
    assert line == (
        "1x1 on 1023 (us): 10.0 TritonDecode(span=64, programs=1024) | 20.0 TritonDecode(span=64)*"
    )


class FakeTimer:
    """A GPU on which all tilings take as long but those of 1,024 programs."""

    def __init__(self, layer: object) -> None:
        pass

    def compile(self, case: object, tiling: object, *, may_spill: bool) -> str:
        return repr(tiling)

    def microseconds(self, case: Steps, program: str) -> tuple[float, ...]:
        return (50.0 if "1024" in program else 100.0,) * len(case.workloads)

    def close(self) -> None:
        pass


def test_tuning_attention_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_attention, "GpuTimer", FakeTimer)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    files = ["--json", str(tmp_path / "all.json"), "--table", str(tmp_path / "tuned.py")]
    flags = ["--backend", "triton", "--seconds", "60", "--shapes", "32:8:128", "64:8:64:int8"]
    monkeypatch.setattr("sys.argv", ["tune_attention.py", *files, *flags])
    tune_attention.main()
    written: dict[str, dict[str, dict[object, Tilings]]] = {}
    exec((tmp_path / "tuned.py").read_text(), written)
    of_kind = written["TUNED"][jax.devices()[0].device_kind]
    assert set(of_kind) == {(128, 4, 16, "bfloat16"), (64, 8, 16, "int8")}
    assert of_kind[128, 4, 16, "bfloat16"].decode == ((256, TritonDecode(64, programs=1024)),)
    assert len(json.loads((tmp_path / "all.json").read_text())) == 8
    assert "20 of 20" in capsys.readouterr().out
