"""Weights quantised as they are loaded, drawn at random or read from what was converted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from paged.errors import ConfigError
from paged.models.loading import resolve_model
from paged.models.loading.convert import convert
from paged.models.loading.params import load_params
from paged.models.quantized import ChannelScaled, GroupScaled, weight_bytes
from paged.models.quantized.making import ToGroups
from paged.models.weights import Dense, param_bytes, param_shapes, param_shardings
from tests.models.harness import load_golden, tiny_tensors, write_checkpoint
from tests.models.quantized.packers import one_layer

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
METHODS = ("fp8", "int8", "int4")


@pytest.fixture
def source(tmp_path):
    return resolve_model(write_checkpoint(tmp_path / "model", one_layer("llama_wide")))


def expanded(weight: Any) -> np.ndarray:
    if isinstance(weight, GroupScaled):
        return np.asarray(weight.expanded(F32))
    return np.moveaxis(np.asarray(weight.weight, np.float32) * weight.scale[..., None], -1, 0)


@pytest.mark.parametrize(("method", "most"), [("fp8", 0.03), ("int8", 0.01), ("int4", 0.12)])
def test_weights_are_near_those_in_full_precision(source, method, most):
    plain = source.load(F32, progress=False).layers[0]
    made = source.quantized(method, ["lm_head"]).load(F32, progress=False).layers[0]
    for name in ("qkv", "out", "gate_up", "down"):
        kernel = np.asarray(getattr(plain, name).kernel)
        error = expanded(getattr(made, name)) - kernel
        assert np.sqrt((error**2).mean()) < most * kernel.std(), name


@pytest.mark.parametrize("method", METHODS)
def test_random_weights_are_those_that_would_be_drawn_and_then_quantised(source, method):
    dummy = resolve_model(source.folder, load_format="dummy")
    plain = dummy.load(F32).layers[0].down.kernel
    made = dummy.quantized(method, ["lm_head"]).load(F32).layers[0].down
    assert np.std(expanded(made) - np.asarray(plain)) < 0.12 * np.std(plain)


def test_the_scale_of_a_group_is_the_best_of_a_few():
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(128, 50)), F32)
    made = ToGroups(4, 32)(kernel)
    weight = GroupScaled(made["weight"], made["scale"], bits=4)
    largest = jnp.max(jnp.abs(kernel.reshape(4, 32, 50)), axis=1) / 7
    plain = jnp.round(kernel.reshape(4, 32, 50) / largest[:, None]) * largest[:, None]
    error, usual = weight.expanded(F32) - kernel, plain.reshape(128, 50) - kernel
    assert jnp.mean(error**2) < 0.85 * jnp.mean(usual**2)


def test_weights_of_nothing_stay_nothing():
    made = ToGroups(4, 32)(jnp.zeros((64, 3)))
    assert not GroupScaled(made["weight"], made["scale"], bits=4).expanded(F32).any()


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (["lm_head"], {"lm_head"}),
        (["*.down_proj", "lm_head"], {"lm_head", "down"}),
        (["*.k_proj", "lm_head"], {"lm_head", "qkv"}),  # with what it is multiplied with
        ([], set()),
    ],
)
def test_what_is_excluded_stays(source, exclude, left):
    specs = source.quantized("int8", exclude).specs
    named = vars(specs.layers[0]) | {"lm_head": specs.head}
    assert {name for name, weight in named.items() if isinstance(weight, Dense)} == left


def test_bytes_are_counted_before_anything_is_loaded(source):
    quantized = source.quantized("int4", ["lm_head"])
    params = quantized.load(BF16, progress=False)
    found = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert param_bytes(quantized.specs, BF16) == found
    assert param_shapes(quantized.specs, BF16) == jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params
    )
    counted = weight_bytes(quantized.specs, BF16)
    projections = 128 * 256 * 5 + 128 * 128 * 2
    assert counted.quantized == projections // 2 + projections // 128 * 2
    assert counted.experts == 0
    assert sum(counted) == found


def test_experts_that_are_excluded_stay_and_are_counted(tmp_path):
    source = resolve_model(write_checkpoint(tmp_path, load_golden("mixtral")))
    quantized = source.quantized("fp8", ["lm_head", "*.gate", "*.experts.*"])
    layer = quantized.specs.layers[0]
    assert isinstance(layer.qkv, ChannelScaled)
    assert isinstance(layer.mixture.router, Dense)
    assert weight_bytes(quantized.specs, BF16).experts == sum(
        param_bytes((each.mixture.gate_up, each.mixture.down), BF16) for each in source.specs.layers
    )


@pytest.mark.parametrize("method", METHODS)
def test_what_was_converted_is_quantised_as_it_was_before(source, method, tmp_path):
    convert(source, tmp_path / "out", F32, show_progress=False)
    converted = resolve_model(tmp_path / "out")
    expected, found = (
        each.quantized(method, ["lm_head"]).load(F32, progress=False)
        for each in (source, converted)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("method", METHODS)
def test_parts_lie_on_devices_as_the_kernels_would(source, method):
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("tensor",))
    specs = source.quantized(method, ["lm_head"]).specs
    layer = param_shardings(specs, mesh).layers[0]
    of = {name: getattr(layer, name) for name in ("qkv", "down")}
    tensor = "tensor"
    if method == "int4":
        assert of["qkv"].weight.spec == PartitionSpec(None, tensor, None, None)
        assert of["qkv"].scale.spec == PartitionSpec(None, tensor, None, None)
        assert of["down"].weight.spec == PartitionSpec(tensor, None)
        assert of["down"].scale.spec == PartitionSpec(tensor, None)
    else:
        assert of["qkv"].weight.spec == PartitionSpec(tensor, None, None, None)
        assert of["qkv"].scale.spec == PartitionSpec(tensor, None, None)
        assert of["down"].weight.spec == PartitionSpec(None, tensor)
        assert of["down"].scale.spec == PartitionSpec(None)
    _, checkpoint = source.open()
    placed = load_params(
        specs, checkpoint, F32, show_progress=False, sharding=param_shardings(specs, mesh)
    )
    expected = source.quantized(method, ["lm_head"]).load(F32, progress=False)
    jax.tree.map(np.testing.assert_array_equal, placed, expected)


def test_a_weight_and_its_scales_read_a_tensor_once(source):
    reads: list[str] = []
    _, checkpoint = source.open()

    class Counting:
        tensors = checkpoint.tensors

        def read(self, name: str) -> np.ndarray:
            reads.append(name)
            return checkpoint.read(name)

    load_params(source.quantized("fp8", []).specs, Counting(), F32, show_progress=False)
    assert sorted(reads) == sorted(tiny_tensors(one_layer("llama_wide")))


def test_inputs_that_do_not_divide_into_groups_are_refused_by_name(tmp_path):
    source = resolve_model(write_checkpoint(tmp_path, load_golden("phi3")))
    with pytest.raises(ConfigError, match=r"72 inputs of .*qkv_proj.*exclude it"):
        _ = source.quantized("int4", []).specs


def test_what_is_quantised_is_not_quantised_again(source):
    with pytest.raises(ConfigError, match=r"--quantization int8 .*by fp8 already"):
        source.quantized("fp8", []).quantized("int8", [])
