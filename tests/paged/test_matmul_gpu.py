"""The kernel compiled and run on a GPU: edges of arrays, and the shapes of an 8B model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from paged.matmul import Tiling, available, matmul
from paged.matmul.estimate import ranked_tilings

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not available(jax.devices()[0]):
        pytest.skip("needs a Hopper GPU")


def check(m: int, k: int, n: int, how: Tiling, *, gated: bool = False) -> None:
    """The product of random numbers against XLA's in float32; a residual unless there are gates."""
    keys = jax.random.split(jax.random.key(m), 3)
    x = jax.random.normal(keys[0], (m, k), "bfloat16")
    w = jax.random.normal(keys[1], (k, 2, n) if gated else (k, n), "bfloat16") / k**0.5
    residual = None if gated else jax.random.normal(keys[2], (m, n), "bfloat16")
    found = jax.jit(lambda x, w, residual: matmul(x, w, how, residual=residual))(x, w, residual)
    exact = jnp.tensordot(x, w, 1, preferred_element_type=jnp.float32)
    exact = jax.nn.silu(exact[:, 0]) * exact[:, 1] if gated else exact
    exact = exact if residual is None else exact + residual.astype(jnp.float32)
    error = jnp.abs(found.astype(jnp.float32) - exact)
    assert float(jnp.max(error - 0.01 * jnp.abs(exact))) < 1e-2


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 13, 33, 64, 100])
def test_any_number_of_rows(m: int, gated: bool) -> None:
    check(m, 512, 448, Tiling(widths=(128,)), gated=gated)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [1, 16, 96, 200, 520, 1000])
@pytest.mark.parametrize(("k", "n"), [(576, 1536), (2048, 320), (4096, 6144)])
def test_the_best_tilings_of_the_estimate(k: int, n: int, m: int, gated: bool) -> None:
    for _, how in ranked_tilings(m, k, n, gated=gated, residual=not gated)[:3]:
        check(m, k, n, how, gated=gated)
