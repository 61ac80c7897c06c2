"""The kernel, run warpgroup by warpgroup in Pallas' interpreter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.matmul import Tiling, matmul, supports, tiling

ONE = Tiling(row_warpgroups=1, widths=(64,))
TWO = Tiling(widths=(128,))


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that each has several tiles."""
    monkeypatch.setattr(tiling, "MULTIPROCESSORS", 4)


def check(
    m: int,
    k: int,
    n: int,
    how: Tiling,
    *,
    gated: bool = False,
    residual: bool = False,
    dtype: str = "bfloat16",
    out_dtype: str | None = None,
) -> None:
    """The product of random numbers against the same in float32."""
    keys = jax.random.split(jax.random.key(m * n + k), 3)
    x = jax.random.normal(keys[0], (m, k), dtype)
    w = (jax.random.normal(keys[1], (k, 2, n) if gated else (k, n)) / k**0.5).astype(dtype)
    r = jax.random.normal(keys[2], (m, n), dtype) if residual else None
    out = jnp.dtype(out_dtype or dtype)
    found = matmul(x, w, how, residual=r, out_dtype=out, interpret=plgpu.InterpretGPUParams())
    assert found.dtype == out
    exact = jnp.tensordot(x, w, 1, preferred_element_type=jnp.float32)
    exact = jax.nn.silu(exact[:, 0]) * exact[:, 1] if gated else exact
    exact = exact if r is None else exact + r.astype(jnp.float32)
    tolerance = 2 * float(jnp.finfo(out).eps)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=tolerance, atol=1e-3)


@pytest.mark.parametrize("m", [1, 4, 8, 13, 64, 96, 200])
def test_any_number_of_rows(m: int) -> None:
    check(m, 256, 192, ONE, residual=True)


@pytest.mark.parametrize("m", [3, 40, 130])
def test_gates(m: int) -> None:
    check(m, 128, 192, TWO, gated=True)


def test_a_tile_wider_than_the_output() -> None:
    check(16, 128, 64, dataclasses.replace(ONE, widths=(256,)), residual=True)


@pytest.mark.parametrize("residual", [False, True])
def test_parts_of_k_are_summed(residual: bool) -> None:
    check(24, 512, 128, dataclasses.replace(ONE, splits=4, residents=2), residual=residual)


def test_float32_output_of_float16() -> None:
    check(20, 128, 128, ONE, dtype="float16", out_dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        Tiling(widths=(256, 128)),
        Tiling(widths=(128,), row_cluster=2),
        Tiling(widths=(128,), column_cluster=2),
        Tiling(widths=(128,), row_warpgroups=1, column_warpgroups=2),
        Tiling(widths=(128,), row_cluster=2, column_cluster=2),
        Tiling(widths=(128,), column_cluster=2, depth=128),
    ],
    ids=str,
)
@pytest.mark.parametrize(("m", "n"), [(72, 448), (520, 128)])
def test_tilings(how: Tiling, m: int, n: int, gated: bool) -> None:
    check(m, 256, n, how, gated=gated, residual=not gated)


def test_what_is_left_to_xla() -> None:
    def takes(dtype: str, *shape: int) -> bool:
        weight = jax.ShapeDtypeStruct(shape, dtype)
        return supports(jax.ShapeDtypeStruct((8, shape[0]), dtype), weight)

    assert takes("bfloat16", 128, 64)
    assert takes("float16", 128, 2, 64)
    assert not takes("float32", 128, 64)
    assert not takes("bfloat16", 96, 64)
    assert not takes("bfloat16", 128, 96)
    assert not takes("bfloat16", 128, 3, 64)


def test_what_the_kernel_cannot_do_is_refused() -> None:
    x, w = jnp.zeros((8, 96), jnp.bfloat16), jnp.zeros((96, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="multiples of 64, got bfloat16"):
        matmul(x, w, ONE)
    x, w = jnp.zeros((8, 192), jnp.bfloat16), jnp.zeros((192, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="got 192 with 128 times 1"):
        matmul(x, w, dataclasses.replace(ONE, depth=128))
    with pytest.raises(ValueError, match="got 3 splits"):
        matmul(x, w, dataclasses.replace(ONE, splits=3))
