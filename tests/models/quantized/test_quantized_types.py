"""How quantised weights multiply, against the same in numpy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from paged import matmul
from paged.models.quantized import ChannelScaled, GroupScaled, GroupShifted, TileScaled, bricks
from paged.models.quantized.bricks import InBricks
from paged.models.quantized.channels import HopperChannelScaled
from paged.models.quantized.groups import pack, unpack
from paged.models.weights import PINNED, Dense, for_device
from tests.paged import aot

T, K, H, E = 5, 96, 3, 8
INTERPRETED = plgpu.InterpretGPUParams()
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


def on_hopper(weight: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The weight as a Hopper GPU has it, its kernels interpreted."""
    for name, how in (
        ("narrow_matmul", INTERPRETED),
        ("expanded", INTERPRETED),
        ("scaled_matmul", INTERPRETED),
        ("scaled_rows", True),
    ):
        kernel = partial(getattr(matmul, name), interpret=how)
        monkeypatch.setattr(matmul, name, kernel)
    return for_device(weight, aot.H200.device)


def near(found: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(found.astype(F32), expected.astype(F32), rtol=0.02, atol=0.2)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_groups_on_hopper_multiply_as_elsewhere(asymmetric, ordered, monkeypatch):
    rng = np.random.default_rng(0)
    inputs, shape = 256, (2, 2, 64)
    weight = GroupScaled(
        jnp.asarray(rng.integers(0, 256, (inputs // 2, 2, 64)), jnp.uint8),
        jnp.asarray(rng.normal(size=shape) / 10, jnp.bfloat16),
        jnp.asarray(rng.integers(0, 16, shape), jnp.uint8) if asymmetric else None,
        jnp.asarray(rng.permutation(inputs), jnp.int32) if ordered else None,
        jnp.asarray(drawn(2, 2, 64)),
        bits=4,
    )
    faster = on_hopper(weight, monkeypatch)
    assert type(faster) is InBricks
    for rows in (5, 1032):  # the second has the weight written out
        x = jnp.asarray(drawn(3, rows, inputs), jnp.bfloat16)
        near(faster(x, F32), weight(x, F32))
    near(faster.gated(x, "silu"), weight.gated(x, "silu"))


@pytest.mark.parametrize(
    ("rows", "piece", "large"),
    [(25, 16, False), (48, 24, False), (49, None, False), (96, 24, True), (97, None, True)],
)
def test_more_rows_on_hopper_are_multiplied_in_even_pieces(rows, piece, large, monkeypatch):
    """Beyond two, or four of a large weight, it is written out, which changes but rounding."""
    rng = np.random.default_rng(0)
    weight = GroupScaled(
        jnp.asarray(rng.integers(0, 256, (128, 128)), jnp.uint8),
        jnp.asarray(2.0 ** rng.integers(-5, -2, (2, 128)), jnp.bfloat16),  # no weight is rounded
        jnp.asarray(rng.integers(0, 16, (2, 128)), jnp.uint8),
        bits=4,
    )
    faster = on_hopper(weight, monkeypatch)
    kernel, pieces = matmul.narrow_matmul, set()

    def noted(x, *args, **how):
        pieces.add(len(x))
        return kernel(x, *args, **how)

    monkeypatch.setattr(matmul, "narrow_matmul", noted)
    monkeypatch.setattr(matmul, "MOST_NARROW_ROWS", 24)
    monkeypatch.setattr(bricks, "_LARGE", 2 * 256 * 128 - large)
    x = jnp.asarray(drawn(3, rows, 256), jnp.bfloat16)
    found = faster(x, F32)
    assert pieces == ({piece} if piece else set())
    written = matmul.expanded(faster.words, faster.scale, faster.zero)
    exact = jnp.matmul(x.astype(F32), written.astype(F32).T, precision="highest")
    assert found.dtype == F32
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)


def test_tiles_on_hopper_multiply_as_elsewhere(monkeypatch):
    values, scales = drawn(0, 2, 64, 256), np.abs(drawn(1, 2, 64, 2)) / 10
    weight = TileScaled(jnp.asarray(values).astype(jnp.float8_e4m3fn), jnp.asarray(scales))
    faster = on_hopper(weight, monkeypatch)
    assert type(faster) is InBricks
    x = jnp.asarray(drawn(3, 9, 256), jnp.bfloat16)
    near(faster(x, F32), weight(x, F32))
    near(faster.gated(x, "silu"), weight.gated(x, "silu"))
    near(faster.gated(x, "gelu"), weight.gated(x, "gelu"))


def shifted(inputs: int, outputs: int) -> GroupShifted:
    scale = jnp.ones((inputs // 64, outputs), jnp.float16)
    return GroupShifted(jnp.zeros((inputs // 2, outputs), jnp.uint8), scale, scale, bits=4)


@pytest.mark.parametrize(
    "weight",
    [
        GroupScaled(jnp.zeros((128, 64), jnp.uint8), jnp.ones((2, 64), jnp.bfloat16), bits=4),
        TileScaled(jnp.zeros((64, 256), jnp.float8_e4m3fn), jnp.ones((64, 2))),
        shifted(256, 64),
    ],
    ids=lambda weight: type(weight).__name__,
)
def test_what_a_hopper_gpu_multiplies_stays_on_the_host(weight):
    place = SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED)
    on_host = jax.device_put(weight, place)
    shapes = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding), on_host
    )
    faster, described = (for_device(each, aot.H200.device) for each in (on_host, shapes))
    assert type(faster) is not type(weight)
    assert type(faster) is type(described)
    assert {each.sharding for each in jax.tree.leaves((faster, described))} == {place}


def test_shapes_of_weights_that_devices_share_stay_shares():
    place = NamedSharding(AbstractMesh((2,), ("tensor",)), PartitionSpec(None, "tensor"))
    shapes = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place), shifted(256, 128)
    )
    faster = for_device(shapes, aot.H200.device)
    assert {each.sharding for each in jax.tree.leaves(faster)} == {place}


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_channels_on_hopper_multiply_as_elsewhere(dtype, monkeypatch):
    values, scales = by_row(drawn(1, 2, 64, 256), dtype)
    weight = ChannelScaled(jnp.asarray(values.astype(dtype)), jnp.asarray(scales[..., 0], F32))
    faster = on_hopper(weight, monkeypatch)
    assert type(faster) is HopperChannelScaled
    x = jnp.asarray(drawn(0, 9, 256), jnp.bfloat16)
    near(faster(x), weight(x))
    near(faster.gated(x, "silu"), weight.gated(x, "silu"))
    one, plain = (
        replace(each, weight=each.weight[0], scale=each.scale[0]) for each in (faster, weight)
    )
    residual = jnp.asarray(drawn(2, 9, 64), jnp.bfloat16)
    near(one.added_to(residual, x), plain.added_to(residual, x))


def test_what_the_kernels_do_not_take_stays_as_it_is():
    for weight in weights((96, 2, 6))[2:]:
        assert for_device(weight, aot.H200.device) is weight
    odd = for_device(weights((96, 2, 6))[0], aot.H200.device)
    x = jnp.ones((T, 96))
    np.testing.assert_allclose(odd(x), weights((96, 2, 6))[0](x))


def test_what_devices_share_stays_as_they_share_it():
    mesh = AbstractMesh((2,), ("tensor",))
    shared = NamedSharding(mesh, PartitionSpec("tensor"))
    shapes: list[Any] = [
        jax.ShapeDtypeStruct((128, 256), jnp.float8_e4m3fn, sharding=shared),
        jax.ShapeDtypeStruct((128, 2), F32, sharding=shared),
    ]
    tiles = TileScaled(*shapes)
    assert for_device(tiles, aot.H200.device) is tiles


def test_shapes_become_those_of_the_weights():
    rows = (2, 64, 256)
    for weight in (
        TileScaled(jnp.zeros(rows, jnp.float8_e4m3fn), jnp.zeros((2, 64, 2))),
        GroupScaled(
            jnp.zeros((128, 2, 64), jnp.uint8), jnp.zeros((2, 2, 64), jnp.bfloat16), bits=4
        ),
    ):
        made = jax.eval_shape(lambda w: w, for_device(weight, aot.H200.device))
        shapes = for_device(jax.eval_shape(lambda w: w, weight), aot.H200.device)
        assert jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), made, shapes)
        assert str(jax.tree.structure(made)) == str(jax.tree.structure(shapes))
