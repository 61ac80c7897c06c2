"""The benchmark of several GPUs, as far as it goes without one."""

import jax
import pytest

from benchmarks import step_kernels
from benchmarks.step_kernels import Case
from benchmarks.tensor_parallel import num_pages, per_gpu, show, step_shapes
from paged.models.loading import resolve_model
from paged.runtime.placement import Placement


def test_pages_are_for_the_largest_case() -> None:
    cases = [Case.parse(text) for text in ("decode:1x1088", "decode:256x512", "decode:3x15")]
    assert num_pages(cases) == 1 + 256 * 33
    assert num_pages(cases[2:]) == 1 + 3


def test_shapes_are_those_of_each_device() -> None:
    source = resolve_model("benchmarks/models/llama-3.1-70b", load_format="dummy")
    shapes = step_shapes(source, Placement.on(jax.devices()[:1]), 9)
    assert (shapes.model.num_heads, shapes.cache.num_kv_heads, shapes.cache.num_pages) == (64, 8, 9)


def test_kernels_of_all_are_told_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("ncclDevKernel_AllReduce", "psum_1_fusion", "paged_decode")
    kinds = [step_kernels.kind(name) for name in names]
    assert kinds == ["collectives", "collectives", "attention"]
    figure = {
        "case": "decode:1x1",
        "wall_ms": 2.0,
        "kernel_ms": 3.0,
        "launches": 8,
        "kinds_ms": {"collectives": 1.0, "attention": 2.0},
        "kernels": [("paged_decode", 2.0, 4)],
    }
    each = per_gpu(figure, 2)
    assert each["kinds_ms"] == {"collectives": 0.5, "attention": 1.0}
    show({"size": 2, **each}, 3.0, 1)
    line, longest = capsys.readouterr().out.splitlines()
    assert "on 2: wall 2.000 ms, 1.50 times one GPU, kernels 1.500" in line
    assert longest.split()[:3] == ["1000.0", "us", "2.0"]
