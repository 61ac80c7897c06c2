"""The search for tilings: under a clock of its own, and with real programs on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from paged.attention.tiling import MosaicDecode, Tilings, TritonDecode, TritonPrefill
from paged.attention.tuning import timer
from paged.attention.tuning.search import Tiling, fastest, num_candidates, search
from paged.attention.tuning.workloads import Case, Layer, Workload, cases
from paged.cache import CacheSpec

BF16 = jnp.dtype("bfloat16")

LAYER = Layer(8, CacheSpec(2, 5, 16, 2, 64, jnp.dtype("bfloat16")), jnp.dtype("bfloat16"), "triton")
FULL = cases(1024, 8192, 131072)


class Table:
    """A GPU whose times are known: 100 us, but for some tilings."""

    def __init__(self, times: dict[Tiling, float], failing: set[Tiling] | None = None) -> None:
        self.times, self.failing = times, failing or set()
        self.compiled: list[tuple[Case, Tiling]] = []
        self.spilling: set[Tiling] = set()

    def compile(self, case: Case, tiling: Tiling, *, may_spill: bool) -> Tiling:
        if tiling in self.failing:
            raise ValueError("out of shared memory")
        self.compiled.append((case, tiling))
        if may_spill:
            self.spilling.add(tiling)
        return tiling

    def microseconds(self, case: Case, program: Tiling) -> tuple[float, ...]:
        return tuple(self.times.get(program, 100.0) for _ in case.workloads)


def found(table: Table, wanted: list[Case] = FULL, **how: Any) -> Tilings:
    options: dict[str, Any] = {"seconds": 60, "advance": lambda _: None} | how
    return fastest(LAYER, search(LAYER, wanted, table, **options))


def test_workloads_go_up_to_the_limits() -> None:
    sizes = [(each.decode, each.size, len(each.workloads)) for each in FULL]
    assert sizes == [(False, 2048, 1), (True, 1, 1), (True, 32, 2), (True, 256, 1)]
    small = cases(32, 512, 4096)
    assert [(each.decode, each.size) for each in small] == [(False, 512), (True, 1), (True, 32)]
    assert max(each.longest for each in small) == 4096


def test_the_fastest_wins_and_equals_are_joined() -> None:
    rule, better = FULL[-1].candidates(LAYER)[:2]
    assert found(Table({better: 50.0})).decode == ((256, better),)
    assert found(Table({})).decode == ((256, rule),)


def test_a_gain_that_may_be_noise_is_none() -> None:
    rule, better = FULL[-1].candidates(LAYER)[:2]
    assert found(Table({better: 99.0})).decode == ((256, rule),)


def test_each_size_has_its_own() -> None:
    small, large = (TritonDecode(span=64, programs=1024), TritonDecode(span=64, stages=2))

    class BySize(Table):
        def microseconds(self, case: Case, program: Tiling) -> tuple[float, ...]:
            best = small if case.size <= 8 else large
            return (50.0,) if program == best else (100.0,)

    assert found(BySize({})).decode == ((1, small), (256, large))


def test_what_does_not_compile_is_passed_over() -> None:
    rule, better, next_best = FULL[-1].candidates(LAYER)[:3]
    table = Table({better: 10.0, next_best: 20.0}, failing={better, rule})
    assert found(table).decode == ((256, next_best),)


def test_what_does_not_run_is_passed_over() -> None:
    rule, better = FULL[-1].candidates(LAYER)[:2]

    class Broken(Table):
        def microseconds(self, case: Case, program: Tiling) -> tuple[float, ...]:
            if program == better:
                raise RuntimeError("too many resources requested for launch\nand more")
            return super().microseconds(case, program)

    assert found(Broken({better: 1.0})).decode == ((256, rule),)


def test_only_the_rule_may_spill() -> None:
    table = Table({})
    found(table)
    assert table.spilling == {case.candidates(LAYER)[0] for case in FULL}


def test_nothing_that_runs_is_an_error() -> None:
    failing = {tiling for case in FULL for tiling in case.candidates(LAYER)}
    with pytest.raises(
        RuntimeError, match=r"no attention kernel could be timed: none was compiled"
    ):
        found(Table({}, failing))


def test_time_is_kept_and_the_likeliest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that hangs after the first round, and a clock that runs out while timing."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    free = threading.Event()

    class Slow(Table):
        def compile(self, case: Case, tiling: Tiling, *, may_spill: bool) -> Tiling:
            if not may_spill:
                free.wait(30)
            return super().compile(case, tiling, may_spill=may_spill)

    times = iter([0.0, *[1.0] * 3, *[9.0] * 99])
    advanced: list[int] = []
    table = Slow({})
    try:
        tilings = found(table, seconds=2, advance=advanced.append, now=lambda: next(times))
    finally:
        free.set()
    assert len(advanced) == len(FULL)
    rules = {case.decode: case.candidates(LAYER)[0] for case in FULL}
    assert tilings == Tilings(((256, rules[True]),), ((2048, rules[False]),))  # type: ignore[arg-type]
    assert num_candidates(LAYER, FULL) > len(FULL)


def test_on_hopper_what_mosaic_leaves_to_triton_is_tried_for_triton() -> None:
    def kinds(head_dim: int, heads: int, dtype: str = "bfloat16") -> set[type]:
        cache = CacheSpec(1, 5, 16, 1, head_dim, jnp.dtype(dtype))
        layer = Layer(heads, cache, BF16, "mosaic")
        return {type(tiling) for case in FULL for tiling in case.candidates(layer) if case.decode}

    assert kinds(128, 4) == {MosaicDecode, TritonDecode}
    assert kinds(80, 4) == {TritonDecode}
    assert kinds(128, 24) == {TritonDecode}
    assert kinds(128, 4, "float8_e4m3fn") == {MosaicDecode, TritonDecode}
    assert kinds(128, 4, "int8") == {TritonDecode}


def test_latents_are_tried_for_all_kernels_that_take_them() -> None:
    def found(heads: int, decode: bool) -> list[Tiling]:
        cache = CacheSpec(1, 5, 16, 1, 576, BF16, latent_rank=512)
        layer = Layer(heads, cache, BF16, "mosaic")
        return [each for case in FULL if case.decode == decode for each in case.candidates(layer)]

    of_few = [each for each in found(16, True) if isinstance(each, MosaicDecode)]
    assert set(of_few) == {MosaicDecode(residents=1)}
    assert {type(each) for each in found(16, True)} == {MosaicDecode, TritonDecode}
    assert {type(each) for each in found(128, True)} == {TritonDecode}
    assert {type(each) for each in found(16, False)} == {TritonPrefill}


DECODING = Case(True, 2, (Workload(2, 1, 20), Workload(2, 1, 40)))


@pytest.mark.parametrize(
    ("cache", "case"),
    [
        (CacheSpec(2, 5, 16, 2, 64, BF16), DECODING),
        (CacheSpec(2, 5, 16, 2, 64, jnp.dtype("int8")), Case(False, 40, (Workload(1, 40, 24),))),
        (CacheSpec(2, 5, 16, 1, 256, BF16, latent_rank=64), DECODING),
    ],
    ids=["decode", "prefill", "latents"],
)
def test_programs_run(cache: CacheSpec, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the clock, in the interpreter."""
    calls = []

    def count(program: Callable[..., Any], *args: Any) -> float:
        outputs = program(*args)
        calls.append(len(outputs))
        assert outputs[0].shape == (case.size, 8, 64)
        assert all(bool(jnp.isfinite(each).all()) for each in outputs)
        return 1e3 * len(outputs)

    monkeypatch.setattr(timer, "device_microseconds", count)
    monkeypatch.setattr(timer, "_COLD_BYTES", 30_000)
    monkeypatch.setattr(timer, "_FEWEST_CALLS", 1)
    gpu = timer.GpuTimer(Layer(8, cache, BF16, "triton"), pool_bytes=300_000)
    program = gpu.compile(case, case.candidates(LAYER)[0], may_spill=False)
    assert gpu.microseconds(case, program) == (1e3,) * len(case.workloads)
    assert len(calls) == len(case.workloads)
    assert set(calls) == {2}
    gpu.close()
