"""Products with weights of 4 bits, against numpy, in Pallas' interpreter."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from paged.matmul import int4_matmul, int4_unit, supports_int4


def packed(values: np.ndarray, unit: int) -> np.ndarray:
    """Values [K, N] to bytes [K / 2, N], a byte for two inputs half a unit apart."""
    rows = [
        values[first + i] | values[first + unit // 2 + i] << 4
        for first in range(0, len(values), unit)
        for i in range(unit // 2)
    ]
    return np.stack(rows).astype(np.uint8)


@pytest.mark.parametrize(
    ("rows", "inputs", "group", "dtype"),
    [
        (1, 256, 128, jnp.bfloat16),
        (20, 192, 32, jnp.float16),
        (17, 256, 256, jnp.bfloat16),
        (70, 128, 64, jnp.bfloat16),
    ],
)
def test_products_are_those_of_the_expanded_weight(rows, inputs, group, dtype):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 16, (inputs, 128)).astype(np.uint8)
    scale = rng.normal(size=(inputs // group, 128)).astype(np.float32)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    weight = (values.astype(np.float32) - 8) * np.repeat(scale, group, axis=0)
    out = int4_matmul(
        x, jnp.asarray(packed(values, int4_unit(group))), jnp.asarray(scale), interpret=True
    )
    np.testing.assert_allclose(out, np.asarray(x, np.float32) @ weight, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    ("rows", "outputs", "group", "dtype"),
    [
        (129, 128, 128, jnp.bfloat16),
        (1, 96, 128, jnp.bfloat16),
        (1, 128, 16, jnp.bfloat16),
        (1, 128, 128, jnp.float32),
    ],
)
def test_other_arrays_are_refused(rows, outputs, group, dtype):
    x, weight = jnp.zeros((rows, 256), dtype), jnp.zeros((128, outputs), jnp.uint8)
    scale = jnp.zeros((256 // group, outputs))
    assert not supports_int4(x, weight, scale)
    with pytest.raises(ValueError, match="expand these weights"):
        int4_matmul(x, weight, scale)
