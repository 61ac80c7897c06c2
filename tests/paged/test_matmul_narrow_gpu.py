"""The kernels for weights of 4 and 8 bits compiled and run on a GPU, at an 8B model's shapes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from paged.matmul import Tiling, available, scaled_matmul
from paged.matmul.bricks import FP8, INT4, Kind
from paged.matmul.estimate import ranked_tilings
from paged.matmul.narrow import narrow_matmul

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not available(jax.devices()[0]):
        pytest.skip("needs a Hopper GPU")


def near(found: jax.Array, exact: jax.Array) -> None:
    error = jnp.abs(found.astype(jnp.float32) - exact)
    # Weights are rounded to 16 bits before they are multiplied.
    assert float(jnp.max(error - 0.01 * jnp.abs(exact))) < 0.01 * float(jnp.std(exact)) + 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("k", "n"), [(4096, 6144), (14336, 4096), (512, 320)])
@pytest.mark.parametrize("kind", [INT4, FP8], ids=["int4", "fp8"])
@pytest.mark.parametrize(("m", "group"), [(1, 128), (8, 32), (33, 64), (128, 256), (256, 128)])
def test_out_of_registers(m: int, group: int, k: int, n: int, kind: Kind, dtype: str) -> None:
    keys = jax.random.split(jax.random.key(m), 4)
    scale = (jax.random.normal(keys[0], (k // group, n)) / k**0.5).astype(dtype)
    if kind is INT4:
        values = jax.random.randint(keys[1], (n, k), 0, 16, jnp.uint8)
        zero = jax.random.randint(keys[2], scale.shape, -8, 8).astype(dtype)
        meant = values.astype(jnp.float32) - 8 - jnp.repeat(zero, group, axis=0).T
    else:
        values, zero = jax.random.normal(keys[1], (n, k)).astype(jnp.float8_e4m3fn), None
        meant = values.astype(jnp.float32)
    meant *= jnp.repeat(scale, group, axis=0).T.astype(jnp.float32)
    x = jax.random.normal(keys[3], (m, k), dtype)
    exact = jnp.matmul(x.astype(jnp.float32), meant.T, precision="highest")
    near(jax.jit(narrow_matmul)(x, kind.words(values), scale, zero), exact)


@pytest.mark.parametrize("kind", [INT4, FP8], ids=["int4", "fp8"])
@pytest.mark.parametrize(("k", "n"), [(4096, 28672), (512, 640)])
@pytest.mark.parametrize("m", [1, 16, 33, 136, 256])
def test_gates(m: int, k: int, n: int, kind: Kind) -> None:
    keys = jax.random.split(jax.random.key(m), 3)
    scale = ((1 + jax.random.uniform(keys[0], (k // 128, n))) / k**0.5).astype("bfloat16")
    if kind is INT4:
        values = jax.random.randint(keys[1], (n, k), 0, 16, jnp.uint8)
        meant = (values.astype(jnp.float32) - 8) * jnp.repeat(scale, 128, axis=0).T / 4
        scale /= 4
    else:
        values = jax.random.normal(keys[1], (n, k)).astype(jnp.float8_e4m3fn)
        meant = values.astype(jnp.float32) * jnp.repeat(scale, 128, axis=0).T
    x = jax.random.normal(keys[2], (m, k), "bfloat16")
    both = jnp.matmul(x.astype(jnp.float32), meant.T, precision="highest")
    exact = jax.nn.silu(both[:, : n // 2]) * both[:, n // 2 :]
    product = jax.jit(functools.partial(narrow_matmul, gated=True))
    near(product(x, kind.words(values), scale), exact)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8], ids=["fp8", "int8"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [1, 16, 72, 256, 1000])
@pytest.mark.parametrize(("k", "n"), [(512, 448), (4096, 6144)])
def test_of_8_bits_on_both_sides(k: int, n: int, m: int, gated: bool, dtype: jnp.dtype) -> None:
    ranked = ranked_tilings(m, k, n, gated=gated, residual=not gated, dtype=jnp.dtype(dtype))
    for _, how in ranked[:2]:
        check_scaled(m, k, n, how, dtype, gated=gated)


def check_scaled(m: int, k: int, n: int, how: Tiling, dtype: jnp.dtype, *, gated: bool) -> None:
    keys = jax.random.split(jax.random.key(m), 5)
    drawn = [
        jax.random.normal(keys[i], shape) * (40 if dtype == jnp.int8 else 1)
        for i, shape in enumerate(((m, k), (2, n, k) if gated else (n, k)))
    ]
    x, w = (each.astype(dtype) for each in drawn)
    unit = 1600 if dtype == jnp.int8 else 1
    of_rows = jax.random.uniform(keys[2], (m,)) / unit
    of_columns = jax.random.uniform(keys[3], w.shape[:-1]) / k**0.5
    residual = None if gated else jax.random.normal(keys[4], (m, n), "bfloat16")
    found = jax.jit(
        lambda *a: scaled_matmul(
            a[0], a[1], (a[2], a[3]), how, residual=a[4], out_dtype=jnp.dtype(jnp.bfloat16)
        )
    )(x, w, of_rows, of_columns, residual)
    wide = (each.astype(jnp.float32) for each in (x, w))
    exact = jnp.einsum("mk,...nk->m...n", *wide, precision="highest")
    exact *= of_rows.reshape(m, *[1] * (w.ndim - 1)) * of_columns
    exact = jax.nn.silu(exact[:, 0]) * exact[:, 1] if gated else exact
    near(found, exact if residual is None else exact + residual.astype(jnp.float32))
