"""The kernel compiles for an H200, in registers, with every tiling that was measured to be best."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest

from paged.matmul import Tiling, matmul
from paged.matmul.estimate import ranked_tilings
from paged.matmul.tuned import TUNED, Product
from tests.paged import aot

pytestmark = pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]")

GATE_UP, DOWN = (True, 4096, 14336), (False, 14336, 4096)
BEST = [
    (product, most, tiling)
    for product, rows in TUNED["NVIDIA H200"].items()
    for most, tiling in rows
    if tiling is not None
]


def compile_product(product: Product, m: int, tiling: Tiling, ptxas: Callable[[], str]) -> str:
    """The program's text. The compiler of the kernel must say that it spilled nothing."""
    gated, k, n = product
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, "bfloat16")  # noqa: E731
    program = aot.compile_for_h200(
        lambda x, w, residual: matmul(x, w, tiling, residual=residual),
        shape(m, k),
        shape(k, 2, n) if gated else shape(k, n),
        None if gated else shape(m, n),
    )
    assert aot.nothing_spilled(ptxas())
    text = program.as_text()
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("product", "m", "tiling"),
    [
        (GATE_UP, 1, Tiling(row_warpgroups=1, widths=(128,), column_warpgroups=2)),
        (GATE_UP, 256, Tiling(row_cluster=2)),
        (DOWN, 13, Tiling(row_warpgroups=1, widths=(64,), splits=2)),
        (DOWN, 1024, Tiling(row_cluster=2)),
    ],
)
def test_nothing_is_spilled_and_no_weight_copied(
    product: Product, m: int, tiling: Tiling, ptxas: Callable[[], str]
) -> None:
    text = compile_product(product, m, tiling, ptxas)
    assert "paged_matmul" in text
    assert " copy(" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("product", "m", "tiling"), BEST, ids=str)
def test_what_was_measured(
    product: Product, m: int, tiling: Tiling, ptxas: Callable[[], str]
) -> None:
    compile_product(product, m, tiling, ptxas)


@pytest.mark.slow
@pytest.mark.parametrize("product", [(True, 2048, 6144), (False, 5120, 5120)], ids=str)
@pytest.mark.parametrize("m", [8, 64, 128, 256, 768])
def test_what_the_estimate_prefers(product: Product, m: int, ptxas: Callable[[], str]) -> None:
    gated, k, n = product
    for _, tiling in ranked_tilings(m, k, n, gated=gated, residual=not gated)[:4]:
        compile_product(product, m, tiling, ptxas)
