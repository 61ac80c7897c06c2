"""How quantised weights multiply, against the same in numpy."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paged import matmul
from paged.models.quantized import ChannelScaled, GroupScaled, TileScaled
from paged.models.quantized.groups import HopperGroupScaled, pack, unpack
from paged.models.weights import Dense, for_device
from tests.paged import aot

T, K, H, E = 5, 96, 3, 8
F32 = jnp.dtype(jnp.float32)


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_row(values: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows scaled by their own largest element, as float64, and the scales."""
    most = 127 if dtype is np.int8 else 448
    scales = np.abs(values).max(axis=-1, keepdims=True) / np.float32(most)
    scales[scales == 0] = 1
    scaled = values / scales
    stored = np.round(scaled) if dtype is np.int8 else scaled.astype(ml_dtypes.float8_e4m3fn)
    return stored.astype(np.float64), scales.astype(np.float64)


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_products_of_8_bits_are_those_of_both_sides_quantised(dtype):
    x, plain, bias = drawn(0, T, K), drawn(1, H, E, K), drawn(2, H, E)
    x[2] = 0
    values, scales = by_row(plain, dtype)
    weight = ChannelScaled(
        jnp.asarray(values.astype(dtype)), jnp.asarray(scales[..., 0], F32), jnp.asarray(bias)
    )
    x_values, x_scales = by_row(x, dtype)
    expected = (x_values @ values.reshape(-1, K).T) * x_scales * scales.reshape(-1)
    expected = expected.reshape(T, H, E) + bias
    np.testing.assert_allclose(weight(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)
    narrow = weight(jnp.asarray(x, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(F32), expected, rtol=0.05, atol=0.3)


def test_values_in_tiles_have_a_scale_for_each_128_inputs():
    values, scales, x = drawn(0, 4, 200), np.abs(drawn(1, 4, 2)), drawn(2, T, 200)
    stored = jnp.asarray(values).astype(jnp.float8_e4m3fn)
    weight = TileScaled(stored, jnp.asarray(scales))
    meant = np.asarray(stored.astype(F32)) * np.repeat(scales, [128, 72], axis=1)
    np.testing.assert_allclose(weight.expanded(F32), meant, rtol=1e-6)
    np.testing.assert_allclose(weight(jnp.asarray(x)), x @ meant.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 48, 96, 128, 256])
def test_packing_loses_nothing(bits, group):
    values = np.random.default_rng(0).integers(0, 2**bits, (2 * group, 3, 5), np.uint8)
    packed = pack(jnp.asarray(values), bits, group)
    assert packed.shape == (2 * group * bits // 8, 3, 5)
    np.testing.assert_array_equal(unpack(packed, bits, group), values)


def test_a_byte_holds_inputs_that_lie_half_a_unit_apart():
    values = jnp.arange(256, dtype=jnp.uint8)[:, None] % 16
    packed = pack(values.at[64].set(9), 4, 128)
    assert (int(packed[0, 0]), int(packed[1, 0])) == (0 + 9 * 16, 1 + 1 * 16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_groups_have_a_scale_and_perhaps_a_zero_and_an_order(bits, group, asymmetric, ordered):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**bits, (K, H, E))
    scales = np.abs(drawn(1, K // group, H, E))
    zeros = rng.integers(0, 2**bits, scales.shape) if asymmetric else None
    order = rng.permutation(K) if ordered else np.arange(K)
    weight = GroupScaled(
        pack(jnp.asarray(values, jnp.uint8), bits, group),
        jnp.asarray(scales),
        None if zeros is None else jnp.asarray(zeros, jnp.uint8),
        jnp.asarray(order, jnp.int32) if ordered else None,
        jnp.asarray(drawn(2, H, E)),
        bits=bits,
    )
    assert weight.group == group
    middle = 2 ** (bits - 1) if zeros is None else np.repeat(zeros, group, axis=0)
    meant = (values - middle) * np.repeat(scales, group, axis=0)
    x = drawn(3, T, K)
    expected = np.tensordot(x[:, order], meant, axes=1) + drawn(2, H, E)
    np.testing.assert_allclose(weight(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-2)


def weights(shape: tuple[int, ...]) -> list[Any]:
    """The same weight [K, *N] of each type, without a bias, made of ones."""
    inputs, *outputs = shape
    rows = (*outputs, inputs)
    return [
        ChannelScaled(jnp.full(rows, 2, jnp.int8), jnp.full(outputs, 0.5)),
        ChannelScaled(jnp.full(rows, 2, jnp.float8_e4m3fn), jnp.full(outputs, 0.5)),
        TileScaled(jnp.full(rows, 2, jnp.float8_e4m3fn), jnp.full((*outputs, 1), 0.5)),
        GroupScaled(
            jnp.full((inputs // 2, *outputs), 0x99, jnp.uint8), jnp.ones((1, *outputs)), bits=4
        ),
    ]


@pytest.mark.parametrize("kind", range(4))
def test_what_follows_a_product_is_as_after_a_plain_one(kind):
    x, residual = jnp.ones((T, 32)), jnp.asarray(drawn(0, T, 6))
    one, both = weights((32, 6))[kind], weights((32, 2, 6))[kind]
    plain, pair = Dense(jnp.ones((32, 6))), Dense(jnp.ones((32, 2, 6)))
    np.testing.assert_allclose(one.added_to(residual, x), plain.added_to(residual, x), rtol=1e-5)
    np.testing.assert_allclose(both.gated(x, "silu"), pair.gated(x, "silu"), rtol=1e-5)
    assert one(x, jnp.dtype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert one(x.astype(jnp.bfloat16), F32).dtype == F32
    for_device(one, aot.H200.device)  # there is a type for it there


def test_types_are_pytrees_whose_leaves_are_arrays():
    leaves, structure = jax.tree.flatten(weights((32, 6)))
    assert len(leaves) == 8
    assert jax.tree.unflatten(structure, leaves)[3].bits == 4


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_hopper_gpu_multiplies_as_others_do(asymmetric, ordered, monkeypatch):
    rng = np.random.default_rng(0)
    shape = (3, 2, 64)
    weight = GroupScaled(
        jnp.asarray(rng.integers(0, 256, (K // 2, 2, 64)), jnp.uint8),
        jnp.asarray(rng.normal(size=shape), F32),
        jnp.asarray(rng.integers(0, 16, shape), jnp.uint8) if asymmetric else None,
        jnp.asarray(rng.permutation(K), jnp.int32) if ordered else None,
        jnp.asarray(drawn(2, 2, 64)),
        bits=4,
    )
    x = jnp.asarray(drawn(3, T, K), jnp.bfloat16)
    faster: Any = for_device(weight, aot.H200.device)
    monkeypatch.setattr(matmul, "int4_matmul", partial(matmul.int4_matmul, interpret=True))
    found = faster(x, F32)
    assert type(faster) is HopperGroupScaled
    np.testing.assert_allclose(found, weight(x.astype(F32)), rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(faster(x.astype(F32)), weight(x.astype(F32)), rtol=1e-3, atol=1e-2)
