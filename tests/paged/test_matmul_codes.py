"""Grouped products with weights in MXFP4, against numpy, in Pallas' interpreter."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from paged.matmul import grouped_codes_matmul, in_groups, supports_codes
from paged.matmul.tiling import ROW_UNIT

X, K = 3, 96
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
CODES = np.array([*MAGNITUDES, *(-each for each in MAGNITUDES)], np.float32)


def weights(inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes and exponents, and the weights [X, K, N] that they mean."""
    rng = np.random.default_rng(outputs)
    values = rng.integers(0, 16, (X, inputs // 32, 2, 16, outputs), np.uint8)
    exponents = rng.integers(120, 128, (X, inputs // 32, outputs), np.uint8)
    packed = (values[:, :, 0] | values[:, :, 1] << 4).reshape(X, inputs // 2, outputs)
    scale = np.exp2(exponents.astype(np.float32) - 127)
    meaning = CODES[values.reshape(X, inputs // 32, 32, outputs)] * scale[:, :, None]
    return packed, exponents, meaning.reshape(X, inputs, outputs)


@pytest.mark.parametrize("outputs", [128, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "busy"), [(1, 1), (20, X), (80, 2)])
def test_products_are_those_of_the_weights_that_are_meant(rows, busy, dtype, outputs):
    packed, exponents, meaning = weights(K, outputs)
    owners = np.random.default_rng(rows).integers(0, busy, rows)
    order = in_groups(jnp.asarray(owners, jnp.int32), X, most=rows, unit=ROW_UNIT)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(len(order.rows), K)), dtype)
    found = grouped_codes_matmul(
        x, jnp.asarray(packed), jnp.asarray(exponents), order.groups, interpret=True
    )
    places = np.asarray(order.places)
    rows_given = np.asarray(x, np.float32)[places]
    expected = np.einsum("rk,rkn->rn", rows_given, meaning[owners])
    np.testing.assert_allclose(np.asarray(found)[places], expected, rtol=1e-4, atol=1e-3)


def test_other_arrays_are_refused():
    packed, exponents, _ = weights(K, 64)
    order = in_groups(jnp.zeros(8, jnp.int32), X, most=8, unit=ROW_UNIT)
    for x in (jnp.zeros((8, K)), jnp.zeros((64 * (X + 1), K), jnp.bfloat16)):
        assert not supports_codes(x, jnp.asarray(packed), jnp.asarray(exponents))
        with pytest.raises(ValueError, match="expand these weights"):
            grouped_codes_matmul(x, jnp.asarray(packed), jnp.asarray(exponents), order.groups)
