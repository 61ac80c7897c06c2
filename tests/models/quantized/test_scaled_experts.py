"""Quantised experts, and what else a checkpoint has quantised that is no projection here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.matmul import in_groups
from paged.models.experts import DenseExperts
from paged.models.loading import resolve_model
from paged.models.loading.convert import convert
from paged.models.quantized import (
    QUANTIZED,
    ChannelScaled,
    GroupScaled,
    GroupShifted,
    TileScaled,
    plain_kernel,
    weight_bytes,
)
from paged.models.scaled_experts import HopperScaledExperts, ScaledExperts
from paged.models.weights import for_device, param_bytes
from tests.models.gguf_writer import Kind, write_gguf
from tests.models.harness import Runner, load_golden, write_checkpoint
from tests.models.quantized import packers
from tests.models.quantized.packers import resized, write_pair

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
X, K = 5, 64
TOKENS = list(range(3, 20))
SIZES = {72: 64, 100: 96, 20: 32, 120: 192, 60: 96}
TILES = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["gate"]}


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), F32)


def experts() -> ScaledExperts:
    """Of 4 bits, [X, K, 2, 6], with biases."""
    bits = np.random.default_rng(0).integers(0, 256, (X, K // 2, 2, 6), np.uint8)
    weights = GroupScaled(jnp.asarray(bits), drawn(1, X, 2, 2, 6), bits=4)
    return ScaledExperts(weights, drawn(2, X, 2, 6))


def plain(scaled: ScaledExperts) -> DenseExperts:
    kernel = jax.vmap(lambda each: plain_kernel(each, F32))(scaled.weights)
    return DenseExperts(kernel, scaled.bias)


@pytest.mark.parametrize("rows", [1, 9, 200])
@pytest.mark.parametrize("busy", [X, 2])
def test_each_experts_rows_are_multiplied_by_its_own_weight(rows, busy):
    scaled = experts()
    owners = np.random.default_rng(rows).integers(0, busy, rows)
    owners[rows // 2 :: 7] = X  # nobody's
    order = in_groups(jnp.asarray(owners, jnp.int32), X, most=rows)
    x = drawn(3, len(order.rows), K)
    somebodys = slice(0, int(order.groups.ends[-1]))
    found, expected = (each(x, order.groups)[somebodys] for each in (scaled, plain(scaled)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert scaled.gated(x, order.groups, "silu").shape == (len(x), 6)


def test_a_hopper_gpu_expands_the_same_weights():
    device: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="a Hopper")
    scaled = experts()
    faster = for_device(scaled, device)
    assert isinstance(faster, HopperScaledExperts)
    dense = faster._expanded(F32)
    np.testing.assert_array_equal(dense.kernel, plain(scaled).kernel)
    np.testing.assert_array_equal(dense.bias, scaled.bias)


def check_answers(found: Any, expected: Any, most: float = 2e-4) -> Any:
    params = [each.load(F32, progress=False) for each in (found, expected)]
    first, second = (
        Runner(each.config, weights).step({0: TOKENS})
        for each, weights in zip((found, expected), params, strict=True)
    )
    np.testing.assert_allclose(first, second, atol=most)
    return params[0]


@pytest.mark.parametrize(
    ("settings", "packer", "kind"),
    [
        (TILES, packers.tiles("weight_scale_inv"), TileScaled),
        (GPTQ | {"sym": False}, packers.gptq(4, 32, symmetric=False), GroupScaled),
        (
            GPTQ | {"desc_act": True},
            packers.gptq(4, 32, symmetric=True, act_order=True),
            GroupScaled,
        ),
    ],
    ids=["tiles", "gptq", "ordered"],
)
def test_experts_of_a_checkpoint_are_what_their_format_means(settings, packer, kind, tmp_path):
    golden = resized("mixtral", SIZES)
    settings = settings | {"ignored_layers": ["gate"]}
    found, expected = write_pair(tmp_path, golden, settings, lambda _: packer)
    params = check_answers(resolve_model(found), resolve_model(expected))
    mixture = params.layers[0].mixture
    assert type(mixture.gate_up.weights) is type(mixture.down.weights) is kind


def test_latents_of_a_quantised_checkpoint_are_expanded(tmp_path):
    packer = packers.tiles("weight_scale_inv")
    golden = load_golden("deepseek_v3")
    found, expected = write_pair(tmp_path, golden, TILES, lambda _: packer)
    params = check_answers(resolve_model(found), resolve_model(expected))
    assert params.layers[0].attention.key.dtype == F32
    assert isinstance(params.layers[0].attention.inputs, TileScaled)


@pytest.mark.parametrize(
    ("method", "kind"), [("fp8", ChannelScaled), ("int8", ChannelScaled), ("int4", GroupScaled)]
)
def test_experts_are_quantised_on_load(method, kind, tmp_path):
    source = resolve_model(write_checkpoint(tmp_path / "model", resized("mixtral", SIZES)))
    quantized = source.quantized(method, ["lm_head", "*.gate"])
    before, after = (each.load(F32, progress=False) for each in (source, quantized))
    for name in ("gate_up", "down"):
        made = getattr(after.layers[0].mixture, name)
        assert type(made.weights) is kind
        expected = getattr(before.layers[0].mixture, name).kernel
        error = plain(made).kernel - expected
        assert float(jnp.std(error)) < 0.13 * float(jnp.std(expected))
    counted = weight_bytes(quantized.specs, BF16)
    assert counted.experts == 0
    assert sum(counted) == param_bytes(quantized.specs, BF16)

    # Of what was converted in full precision, and of what was quantised and then converted.
    for index, each in enumerate((source, quantized)):
        convert(each, tmp_path / str(index), F32, show_progress=False)
        converted = resolve_model(tmp_path / str(index))
        if each is source:
            converted = converted.quantized(method, ["lm_head", "*.gate"])
        jax.tree.map(np.testing.assert_array_equal, converted.load(F32, progress=False), after)


@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_random_experts_are_quantised_too(method, tmp_path):
    folder = write_checkpoint(tmp_path, resized("mixtral", SIZES))
    source = resolve_model(folder, load_format="dummy").quantized(method, ["*.gate"])
    made = source.load(F32).layers[0].mixture.down
    assert 0.015 < float(jnp.std(plain(made).kernel)) < 0.025


def test_experts_stay_as_a_gguf_file_has_them(tmp_path):
    golden = resized("mixtral", SIZES)
    golden["config"]["sliding_window"] = None
    source = resolve_model(write_gguf(tmp_path / "m.gguf", golden, kind=Kind.Q4_0))
    params = check_answers(source.quantized("gguf", ()), source)
    assert isinstance(params.layers[0].mixture.gate_up.weights, GroupShifted)
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, QUANTIZED))
    assert sum(isinstance(node, GroupShifted) for node in leaves) > 5
