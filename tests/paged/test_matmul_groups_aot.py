"""The kernel for rows in groups compiles for an H200, in registers, for the sizes of models."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest

from paged.matmul import Groups, Tiling, grouped_matmul, grouped_tiling_for
from paged.matmul.estimate import grouped_tilings
from paged.matmul.tuned import GroupedProduct
from tests.paged import aot

pytestmark = pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]")

MIXTRAL, QWEN3 = (True, 8, 4096, 14336), (True, 128, 2048, 768)
GPT_OSS = (False, 32, 2880, 5760)
KIND = "NVIDIA H200"


def compile_product(
    product: GroupedProduct, rows: int, tiling: Tiling, ptxas: Callable[[], str]
) -> None:
    """The compiler must say that it spilled nothing, and the program copy no weight."""
    gated, groups, k, n = product
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, "bfloat16")  # noqa: E731
    program = aot.compile_for_h200(
        lambda x, w, sizes: grouped_matmul(x, w, Groups.of(sizes, rows), tiling),
        shape(rows, k),
        shape(groups, k, 2, n) if gated else shape(groups, k, n),
        jax.ShapeDtypeStruct((groups,), "int32"),
    )
    assert aot.nothing_spilled(ptxas())
    text = program.as_text() or ""
    assert "mosaic_gpu" in text
    assert " copy(" not in text


@pytest.mark.parametrize(
    ("product", "rows"), [(MIXTRAL, 4096), (QWEN3, 64), (GPT_OSS, 256)], ids=str
)
def test_nothing_is_spilled_and_no_weight_copied(
    product: GroupedProduct, rows: int, ptxas: Callable[[], str]
) -> None:
    gated, groups, k, n = product
    tiling = grouped_tiling_for(rows, groups, k, n, device_kind=KIND, gated=gated)
    compile_product(product, rows, tiling, ptxas)


@pytest.mark.slow
@pytest.mark.parametrize("product", [MIXTRAL, QWEN3, GPT_OSS], ids=str)
@pytest.mark.parametrize("rows", [64, 65536])
def test_all_that_are_worth_a_try(
    product: GroupedProduct, rows: int, ptxas: Callable[[], str]
) -> None:
    gated, groups, k, n = product
    for tiling in grouped_tilings(rows, groups, k, n, gated=gated):
        compile_product(product, rows, tiling, ptxas)
