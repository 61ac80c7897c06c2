"""The kernel for experts in MXFP4 compiled and run on a GPU, at gpt-oss's shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.matmul import available, grouped_codes_matmul, in_groups
from paged.matmul.tiling import ROW_UNIT
from tests.paged.test_matmul_codes import X, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(2880, 5760), (2880, 2880)])
@pytest.mark.parametrize("rows", [1, 30, 150])
def test_products_are_those_of_the_weights_that_are_meant(
    rows: int, inputs: int, outputs: int, dtype: str
) -> None:
    if not available(jax.devices()[0]):
        pytest.skip("needs a Hopper GPU")
    packed, exponents, meaning = weights(inputs, outputs)
    owners = np.random.default_rng(rows).integers(0, X, rows)
    order = in_groups(jnp.asarray(owners, jnp.int32), X, most=rows, unit=ROW_UNIT)
    numbers = np.random.default_rng(1).normal(size=(len(order.rows), inputs)) / inputs**0.5
    x = jnp.asarray(numbers, dtype)
    found = jax.jit(grouped_codes_matmul)(x, packed, exponents, order.groups)
    places = np.asarray(order.places)
    given = np.asarray(x, np.float32)[places]
    for expert in range(X):
        mine = owners == expert
        np.testing.assert_allclose(
            np.asarray(found)[places][mine], given[mine] @ meaning[expert], atol=2e-3
        )
