"""Quantised weights as a Hopper GPU multiplies them, run on one at the widths of a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paged import matmul
from paged.models.quantized import ChannelScaled, GroupScaled, TileScaled
from paged.models.quantized.channels import scaled
from paged.models.weights import for_device

pytestmark = [
    pytest.mark.gpu,
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

INPUTS, OUTPUTS = 4096, 1536
BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not matmul.available(jax.devices()[0]):
        pytest.skip("needs a Hopper GPU")


def drawn(kind: str) -> Any:
    """A weight [INPUTS, 2, OUTPUTS] of random values, in the type that holds them anywhere."""
    values, scales = jax.random.split(jax.random.key(0))
    rows = jax.random.normal(values, (2, OUTPUTS, INPUTS))
    by_row = (1 + jax.random.uniform(scales, (2, OUTPUTS))) / INPUTS**0.5
    if kind == "int4":
        packed = jax.random.bits(values, (INPUTS // 2, 2, OUTPUTS), jnp.uint8)
        by_group = (1 + jax.random.uniform(scales, (INPUTS // 128, 2, OUTPUTS))) / INPUTS**0.5 / 5
        return GroupScaled(packed, by_group.astype(BF16), bits=4)
    if kind == "int8":
        return ChannelScaled((40 * rows).astype(jnp.int8), by_row / 40)
    stored = rows.astype(jnp.float8_e4m3fn)
    if kind == "fp8":
        return ChannelScaled(stored, by_row)
    return TileScaled(stored, jnp.repeat(by_row[..., None], INPUTS // 128, axis=2))


def product(weight: Any, x: jax.Array) -> jax.Array:
    """x [T, K], as a weight takes it, times its values: [T, 2, F] in float32."""
    scale = jnp.ones(len(x))
    if isinstance(weight, ChannelScaled):
        x, scale = scaled(x, weight.weight.dtype)
        rows = weight.weight.astype(jnp.float32) * weight.scale[..., None]
    elif isinstance(weight, GroupScaled):
        rows = jnp.moveaxis(weight.expanded(jnp.dtype(jnp.float32)), 0, -1)
    else:
        rows = weight.expanded(jnp.dtype(jnp.float32))
    sums = jnp.einsum("tk,gnk->tgn", x.astype(jnp.float32), rows, precision="highest")
    return sums * scale[:, None, None]


@pytest.mark.parametrize("rows", [1, 16, 200, 300, 2048])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "tiles"])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "XLA"])
def test_products_are_those_of_the_values(kind: str, rows: int, *, kernels: bool) -> None:
    """The last rows are more than kernels for few take: they have the weight written out."""
    weight = drawn(kind)
    faster = for_device(weight, jax.devices()[0]) if kernels else weight
    assert (type(faster) is not type(weight)) == kernels
    x = jax.random.normal(jax.random.key(1), (rows, INPUTS), BF16)
    plain = product(weight, x)
    gated = jax.nn.silu(plain[:, 0]) * plain[:, 1]
    cases = (lambda w, x: w(x), plain), (lambda w, x: w.gated(x, "silu"), gated)
    # As engines have it: untuned, XLA (of jax 0.11.2) takes parts of K for int8, and counts twice.
    options = None if kernels else {"xla_gpu_autotune_level": 4}
    for multiplied, expected in cases:
        found = jax.jit(multiplied, compiler_options=options)(faster, x).astype(jnp.float32)
        error = jnp.abs(found - expected) - 0.02 * jnp.abs(expected)
        assert float(jnp.max(error)) < 0.05 * float(jnp.std(expected))
