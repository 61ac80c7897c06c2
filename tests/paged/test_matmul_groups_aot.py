"""The kernel for rows in groups compiles for an H200, in registers, for the sizes of models."""

from __future__ import annotations

import re

import jax
import pytest

from paged.matmul import Groups, Tiling, grouped_matmul, grouped_tiling_for
from paged.matmul.estimate import grouped_tilings
from tests.paged import aot

pytestmark = pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]")

# Gated or not, groups, K, columns of the output.
Product = tuple[bool, int, int, int]
MIXTRAL, QWEN3 = (True, 8, 4096, 14336), (True, 128, 2048, 768)
GPT_OSS = (False, 32, 2880, 5760)
KIND = "NVIDIA H200"


def compile_product(
    product: Product,
    rows: int,
    tiling: Tiling,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The compiler must say that it spilled nothing, and the program copy no weight."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    gated, groups, k, n = product
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, "bfloat16")  # noqa: E731
    program = aot.compile_for_h200(
        lambda x, w, sizes: grouped_matmul(x, w, Groups.of(sizes, rows), tiling),
        shape(rows, k),
        shape(groups, k, 2, n) if gated else shape(groups, k, n),
        jax.ShapeDtypeStruct((groups,), "int32"),
    )
    said = re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert said
    assert set(said) == {"0"}
    text = program.as_text() or ""
    assert "mosaic_gpu" in text
    assert " copy(" not in text


@pytest.mark.parametrize(
    ("product", "rows"), [(MIXTRAL, 4096), (QWEN3, 64), (GPT_OSS, 256)], ids=str
)
def test_nothing_is_spilled_and_no_weight_copied(
    product: Product, rows: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gated, groups, k, n = product
    tiling = grouped_tiling_for(rows, groups, k, n, device_kind=KIND, gated=gated)
    compile_product(product, rows, tiling, monkeypatch, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("product", [MIXTRAL, QWEN3, GPT_OSS], ids=str)
@pytest.mark.parametrize("rows", [64, 65536])
def test_all_that_are_worth_a_try(
    product: Product, rows: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gated, groups, k, n = product
    for tiling in grouped_tilings(rows, groups, k, n, gated=gated):
        compile_product(product, rows, tiling, monkeypatch, capfd)
