"""The kernel for weights of 4 bits compiled and run on a GPU, at an 8B model's shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.matmul import available, int4_matmul, int4_unit
from tests.paged.test_matmul_int4 import packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (14336, 4096), (4096, 28672)])
@pytest.mark.parametrize(("rows", "group"), [(1, 128), (8, 32), (33, 64), (128, 128)])
def test_products_are_those_of_the_expanded_weight(
    rows: int, group: int, inputs: int, outputs: int, dtype: str
) -> None:
    if not available(jax.devices()[0]):
        pytest.skip("needs a Hopper GPU")
    rng = np.random.default_rng(rows)
    values = rng.integers(0, 16, (inputs, outputs)).astype(np.uint8)
    scale = rng.normal(size=(inputs // group, outputs)).astype(np.float32) / inputs**0.5
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    weight = jnp.asarray(values, jnp.float32) - 8
    weight = weight * jnp.repeat(jnp.asarray(scale), group, axis=0)
    found = jax.jit(int4_matmul)(x, jnp.asarray(packed(values, int4_unit(group))), scale)
    exact = jnp.matmul(x.astype(jnp.float32), weight, precision="highest")
    error = jnp.abs(found.astype(jnp.float32) - exact)
    assert float(jnp.max(error - 0.01 * jnp.abs(exact))) < 0.05
