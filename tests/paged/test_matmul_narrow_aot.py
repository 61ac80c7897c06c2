"""The kernels for weights of 4 and 8 bits compile for an H200, in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paged.matmul import FP8, INT4, expanded, narrow_matmul, scaled_matmul
from paged.matmul.bricks import Kind
from paged.matmul.cuts import candidate_cuts
from paged.matmul.estimate import ranked_tilings
from paged.matmul.tiling import Cut
from paged.matmul.tuned import NARROW_FP8, NARROW_INT4, SCALED
from tests.paged import aot

pytestmark = pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]")

BEST = [
    (kind, k, n, most, cut)
    for kind, table in ((INT4, NARROW_INT4), (FP8, NARROW_FP8))
    for (k, n), rows in table["NVIDIA H200"].items()
    for most, cut in rows
]
BEST_SCALED = [
    (product, most, how) for product, rows in SCALED["NVIDIA H200"].items() for most, how in rows
]


def array(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_narrow(
    kind: Kind,
    m: int,
    k: int,
    n: int,
    cut: Cut,
    *,
    group: int = 128,
    zeros: bool = False,
    gated: bool = False,
) -> None:
    scale = array("bfloat16", k // group, n)
    aot.compile_for_h200(
        lambda *a: narrow_matmul(*a, gated=gated, cut=cut),
        array("bfloat16", m, k),
        array(jnp.uint32, n // 64, k // 64, *kind.shape),
        scale,
        scale if zeros else None,
    )


def compile_scaled(gated: bool, m: int, k: int, n: int, how: Any, dtype: Any) -> None:
    outputs = (2, n) if gated else (n,)
    out = jnp.dtype(jnp.bfloat16)
    aot.compile_for_h200(
        lambda x, w, a, b, r: scaled_matmul(x, w, (a, b), how, residual=r, out_dtype=out),
        array(dtype, m, k),
        array(dtype, *outputs, k),
        array("float32", m),
        array("float32", *outputs),
        None if gated else array(out, m, n),
    )


@pytest.mark.parametrize("kind", [INT4, FP8], ids=["int4", "fp8"])
@pytest.mark.parametrize("m", [1, 33, 128, 256])
def test_out_of_registers(m: int, kind: Kind, ptxas: Callable[[], str]) -> None:
    for cut in candidate_cuts(m, 4096, 6144, 128):
        compile_narrow(kind, m, 4096, 6144, cut, zeros=kind is INT4)
    for cut in candidate_cuts(m, 4096, 28672, 128):
        compile_narrow(kind, m, 4096, 28672, cut, gated=True)
    assert aot.nothing_spilled(ptxas())


@pytest.mark.parametrize("kind", [INT4, FP8], ids=["int4", "fp8"])
@pytest.mark.parametrize("group", [256, 1024])
def test_large_groups_out_of_registers(group: int, kind: Kind, ptxas: Callable[[], str]) -> None:
    for m, gated in ((32, False), (32, True), (64, False)):
        for cut in candidate_cuts(m, 1024, 2048, group):
            compile_narrow(kind, m, 1024, 2048, cut, group=group, zeros=kind is INT4, gated=gated)
    assert aot.nothing_spilled(ptxas())


@pytest.mark.parametrize("kind", [INT4, FP8], ids=["int4", "fp8"])
def test_written_out(kind: Kind, ptxas: Callable[[], str]) -> None:
    aot.compile_for_h200(
        expanded, array(jnp.uint32, 96, 64, *kind.shape), array("bfloat16", 32, 6144)
    )
    assert aot.nothing_spilled(ptxas())


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8], ids=["fp8", "int8"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [1, 256, 8192])
def test_of_8_bits_on_both_sides(m: int, gated: bool, dtype: Any, ptxas: Callable[[], str]) -> None:
    for _, how in ranked_tilings(
        m, 4096, 6144, gated=gated, residual=not gated, dtype=jnp.dtype(dtype)
    )[:2]:
        compile_scaled(gated, m, 4096, 6144, how, dtype)
    assert aot.nothing_spilled(ptxas())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "k", "n", "m", "cut"), BEST, ids=str)
def test_what_was_measured(
    kind: Kind, k: int, n: int, m: int, cut: Cut, ptxas: Callable[[], str]
) -> None:
    compile_narrow(kind, m, k, n, cut)
    assert aot.nothing_spilled(ptxas())


@pytest.mark.slow
@pytest.mark.parametrize(("product", "m", "how"), BEST_SCALED, ids=str)
def test_what_was_measured_of_8_bits(
    product: tuple[bool, int, int], m: int, how: Any, ptxas: Callable[[], str]
) -> None:
    gated, k, n = product
    compile_scaled(gated, m, k, n, how, jnp.float8_e4m3fn)
    assert aot.nothing_spilled(ptxas())
