"""Checkpoints as others publish them: what is loaded is what their format means."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.errors import ConfigError
from paged.models.loading import CheckpointError, resolve_model
from paged.models.loading.convert import convert
from paged.models.quantized import ChannelScaled, GroupScaled, TileScaled, published_quantization
from paged.models.weights import Dense, param_shapes
from tests.models.harness import Runner, load_golden
from tests.models.quantized import packers
from tests.models.quantized.packers import FLOAT8, one_layer, write_pair

F32 = jnp.dtype(jnp.float32)
QUANTIZED = (ChannelScaled, GroupScaled, TileScaled)
TOKENS = list(range(3, 20))


def gptq_settings(**others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, **others}


def compressed(kind: str, activations: Any, ignore: tuple[str, ...] = (), **weights: Any) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *ignore],
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INPUTS = {"num_bits": 8, "dynamic": True, "strategy": "token"}
WEIGHT_ONLY: dict[str, tuple[Any, Any]] = {
    "gptq-asymmetric": (gptq_settings(sym=False), packers.gptq(4, 32, symmetric=False)),
    "gptq-symmetric": (
        gptq_settings(sym=True, group_size=-1),
        packers.gptq(4, -1, symmetric=True),
    ),
    "gptq-ordered": (
        gptq_settings(sym=True, desc_act=True, group_size=64),
        packers.gptq(4, 64, symmetric=True, act_order=True),
    ),
    "gptq-second": (
        gptq_settings(sym=False, desc_act=True, checkpoint_format="gptq_v2"),
        packers.gptq(4, 32, symmetric=False, act_order=True, version=2),
    ),
    "gptq-8-bits": (
        gptq_settings(bits=8, sym=False, group_size=128),
        packers.gptq(8, 128, symmetric=False),
    ),
    "awq": (AWQ, packers.awq(64)),
    "fp8-tiles": (
        FP8 | {"weight_block_size": [128, 128]},
        packers.tiles("weight_scale_inv"),
    ),
    "packed": (
        compressed(
            "pack-quantized", None, num_bits=4, strategy="group", group_size=32, symmetric=True
        ),
        packers.pack_quantized(4, 32, symmetric=True),
    ),
    "packed-asymmetric-ordered": (
        compressed(
            "pack-quantized",
            None,
            num_bits=4,
            strategy="group",
            group_size=32,
            symmetric=False,
            actorder="group",
        ),
        packers.pack_quantized(4, 32, symmetric=False, act_order=True),
    ),
    "packed-8-bits": (
        compressed("pack-quantized", None, num_bits=8, strategy="channel", symmetric=True),
        packers.pack_quantized(8, None, symmetric=True),
    ),
    "integers-alone": (
        compressed("int-quantized", None, num_bits=8, strategy="channel", symmetric=True),
        packers.eight_bits(np.int8, per_tensor=False),
    ),
    "float-tiles": (
        compressed(
            "float-quantized",
            INPUTS,
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=[128, 128],
        ),
        packers.tiles("weight_scale"),
    ),
}
BOTH_SIDES: dict[str, tuple[Any, Any]] = {
    "fp8": (FP8, packers.eight_bits(FLOAT8, per_tensor=True, scalar=True)),
    "integers": (
        compressed("int-quantized", INPUTS, num_bits=8, strategy="channel", symmetric=True),
        packers.eight_bits(np.int8, per_tensor=False),
    ),
    "floats": (
        compressed("float-quantized", INPUTS, num_bits=8, type="float", strategy="channel"),
        packers.eight_bits(FLOAT8, per_tensor=False),
    ),
    "floats-per-tensor": (
        compressed("float-quantized", INPUTS, num_bits=8, type="float", strategy="tensor"),
        packers.eight_bits(FLOAT8, per_tensor=True),
    ),
}


def expanded(weight: Any) -> np.ndarray:
    """[K, *N] of a weight, inputs as they come."""
    if isinstance(weight, Dense):
        return np.asarray(weight.kernel)
    if isinstance(weight, ChannelScaled):
        return np.moveaxis(np.asarray(weight.weight, np.float32) * weight.scale[..., None], -1, 0)
    if isinstance(weight, TileScaled):
        return np.moveaxis(np.asarray(weight.expanded(F32)), -1, 0)
    rows = np.asarray(weight.expanded(F32))
    if weight.order is None:
        return rows
    out = np.zeros_like(rows)
    out[np.asarray(weight.order)] = rows
    return out


def nodes(params: Any) -> list[Any]:
    kinds = (*QUANTIZED, Dense)
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in leaves if isinstance(node, kinds)]


def loaded(folder):
    source = resolve_model(folder)
    return source.config, source.load(F32, progress=False)


def check_weights(found: Any, expected: Any, num_plain: int) -> None:
    pairs = list(zip(nodes(found), nodes(expected), strict=True))
    assert sum(isinstance(weight, Dense) for weight, _ in pairs) == num_plain
    for weight, plain in pairs:
        if not isinstance(weight, Dense):
            np.testing.assert_allclose(expanded(weight), plain.kernel, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *BOTH_SIDES])
def test_weights_are_what_their_format_means(name, tmp_path):
    settings, packer = (WEIGHT_ONLY | BOTH_SIDES)[name]
    quantized, plain = write_pair(tmp_path, one_layer("llama_wide"), settings, lambda _: packer)
    check_weights(loaded(quantized)[1], loaded(plain)[1], num_plain=1)  # the head


@pytest.mark.parametrize("name", ["gptq-second", "awq", "fp8-tiles"])
def test_a_model_answers_as_that_of_the_weights_it_means(name, tmp_path):
    settings, packer = WEIGHT_ONLY[name]
    quantized, plain = write_pair(tmp_path, one_layer("llama_wide"), settings, lambda _: packer)
    answers, expected = (Runner(*loaded(each)).step({0: TOKENS}) for each in (quantized, plain))
    np.testing.assert_allclose(answers, expected, atol=2e-4)


@pytest.mark.parametrize("name", ["fp8", "integers"])
def test_activations_quantised_too_change_answers_a_little(name, tmp_path):
    settings, packer = BOTH_SIDES[name]
    quantized, plain = write_pair(tmp_path, one_layer("llama_wide"), settings, lambda _: packer)
    answers, expected = (Runner(*loaded(each)).step({0: TOKENS}) for each in (quantized, plain))
    divergence = (np.exp(expected) * (expected - answers)).sum(axis=-1)
    assert 0 < divergence.mean() < 0.02


def test_slices_of_a_joined_projection_are_cut_of_what_is_stored(tmp_path):
    golden = joined_golden()
    settings, packer = gptq_settings(sym=False), packers.gptq(4, 32, symmetric=False)
    quantized, plain = write_pair(tmp_path, golden, settings, lambda _: packer)
    check_weights(loaded(quantized)[1], loaded(plain)[1], num_plain=1)


def joined_golden() -> dict[str, Any]:
    """A Phi-3 of sizes that divide into groups."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 40,
        "head_dim": 16,
    }
    tensors = {
        "self_attn.qkv_proj": [128, 64],
        "self_attn.o_proj": [64, 64],
        "mlp.gate_up_proj": [192, 64],
        "mlp.down_proj": [64, 96],
        "input_layernorm": [64],
        "post_attention_layernorm": [64],
    }
    config = load_golden("phi3")["config"] | sizes | {"sliding_window": None}
    named = {f"model.layers.0.{name}.weight": shape for name, shape in tensors.items()}
    others = {"model.embed_tokens": [40, 64], "model.norm": [64], "lm_head": [40, 64]}
    return {
        "config": config,
        "tensors": named | {f"{name}.weight": shape for name, shape in others.items()},
    }


def test_excepted_modules_and_biases_stay(tmp_path):
    golden = load_golden("llama_bias")
    settings = compressed(
        "int-quantized",
        INPUTS,
        ("re:.*mlp.down_proj", "model.layers.1.self_attn.o_proj"),
        num_bits=8,
        strategy="channel",
        symmetric=True,
    )
    excepted = ("mlp.down_proj.weight", "layers.1.self_attn.o_proj.weight")
    packer = packers.eight_bits(np.int8, per_tensor=False)
    quantized, plain = write_pair(
        tmp_path, golden, settings, lambda name: None if name.endswith(excepted) else packer
    )
    params, expected = loaded(quantized)[1], loaded(plain)[1]
    check_weights(params, expected, num_plain=4)
    np.testing.assert_array_equal(params.layers[0].qkv.bias, expected.layers[0].qkv.bias)


def test_groups_of_settings_have_their_own_scheme(tmp_path):
    settings = compressed("int-quantized", INPUTS, num_bits=8, strategy="channel", symmetric=True)
    settings["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
        "format": "pack-quantized",
    }
    eight = packers.eight_bits(np.int8, per_tensor=False)
    four = packers.pack_quantized(4, 32, symmetric=True)
    quantized, plain = write_pair(
        tmp_path,
        one_layer("llama_wide"),
        settings,
        lambda name: four if "down_proj" in name else eight,
    )
    params = loaded(quantized)[1]
    check_weights(params, loaded(plain)[1], num_plain=1)
    assert isinstance(params.layers[0].down, GroupScaled)
    assert isinstance(params.layers[0].qkv, ChannelScaled)


@pytest.mark.parametrize("name", ["gptq-second", "fp8"])
def test_a_quantised_checkpoint_can_be_converted(name, tmp_path):
    settings, packer = (WEIGHT_ONLY | BOTH_SIDES)[name]
    quantized, _ = write_pair(tmp_path, one_layer("llama_wide"), settings, lambda _: packer)
    convert(resolve_model(quantized), tmp_path / "out", F32, show_progress=False)
    found, expected = loaded(tmp_path / "out")[1], loaded(quantized)[1]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", ["gptq-second", "fp8-tiles", "integers-alone", "floats"])
def test_random_weights_have_the_shapes_of_a_description(name, tmp_path):
    settings, packer = (WEIGHT_ONLY | BOTH_SIDES)[name]
    quantized, _ = write_pair(tmp_path, one_layer("llama_wide"), settings, lambda _: packer)
    source = resolve_model(quantized, load_format="dummy")
    params = source.load(F32)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == param_shapes(source.specs, F32)
    for weight in nodes(params):
        assert np.isfinite(expanded(weight)).all()
        assert 0.015 < expanded(weight).std() < 0.025


def test_settings_in_a_file_of_their_own_count(tmp_path):
    settings, packer = WEIGHT_ONLY["gptq-asymmetric"]
    folder, _ = write_pair(tmp_path, one_layer("llama_wide"), settings, lambda _: packer)
    data = json.loads((folder / "config.json").read_text())
    inner = data.pop("quantization_config")
    del inner["quant_method"]
    (folder / "config.json").write_text(json.dumps(data))
    (folder / "quantize_config.json").write_text(json.dumps(inner))
    assert resolve_model(folder).config.quantization == published_quantization(
        {"quantization_config": settings}
    )


def test_projections_multiplied_as_one_must_be_ordered_alike(tmp_path):
    settings, packer = WEIGHT_ONLY["gptq-ordered"]
    other = packers.gptq(4, 64, symmetric=True)
    folder, _ = write_pair(
        tmp_path, one_layer("llama_wide"), settings, lambda n: other if "k_proj" in n else packer
    )
    with pytest.raises(CheckpointError, match=r"q_proj.*ordered differently"):
        resolve_model(folder).load(F32, progress=False)


def test_a_bias_that_the_model_has_no_place_for_is_refused_unless_zero(tmp_path):
    settings, packer = WEIGHT_ONLY["gptq-asymmetric"]

    def with_bias(weight: np.ndarray) -> Any:
        packed = packer(weight)
        packed.tensors["bias"][0] = 1
        return packed

    folder, _ = write_pair(tmp_path, one_layer("llama_wide"), settings, lambda _: with_bias)
    with pytest.raises(CheckpointError, match=r"_proj\.bias"):
        resolve_model(folder).load(F32, progress=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "quanto"}, ["'quanto'", "gptq, awq, fp8"]),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            ["fp4", "nf4"],
        ),
        ("fp8", ["'fp8'", "supported"]),
        ({"bits": 4}, ["None", "supported"]),
        (gptq_settings(bits=3), ["bits 3", "4, 8"]),
        (gptq_settings(bits=True), ["bits True"]),
        (gptq_settings(group_size=24), ["group_size 24", "-1"]),
        (gptq_settings(dynamic={"-:.*": {}}), ["dynamic"]),
        (gptq_settings(checkpoint_format="marlin"), ["marlin", "gptq_v2"]),
        (AWQ | {"version": "gemv"}, ["gemv", "gemm"]),
        (AWQ | {"zero_point": False}, ["False"]),
        (FP8 | {"weight_block_size": [64, 64]}, ["[64, 64]", "[128, 128]"]),
        (FP8 | {"ignored_layers": "lm_head"}, ["ignored_layers", "list"]),
        ({"quant_method": "compressed-tensors"}, ["config_groups"]),
        (
            compressed("nvfp4-pack-quantized", INPUTS, num_bits=4, strategy="group"),
            ["nvfp4-pack-quantized", "pack-quantized of 4 or 8 bits"],
        ),
        (
            compressed("float-quantized", None, num_bits=8, strategy="channel"),
            ["float-quantized", "no input_activations"],
        ),
        (
            compressed("int-quantized", INPUTS, ("re:(",), num_bits=8, strategy="channel"),
            ["re:("],
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(settings, words):
    with pytest.raises(ConfigError) as error:
        published_quantization({"quantization_config": settings})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_projections_multiplied_as_one_may_be_stored_in_several_ways(tmp_path):
    packer = packers.tiles("weight_scale_inv")
    settings = FP8 | {
        "weight_block_size": [128, 128],
        "ignored_layers": ["model.layers.0.self_attn.k_proj"],
    }
    quantized, plain = write_pair(
        tmp_path, one_layer("llama_wide"), settings, lambda n: None if "k_proj" in n else packer
    )
    answers, expected = (Runner(*loaded(each)).step({0: TOKENS}) for each in (quantized, plain))
    np.testing.assert_allclose(answers, expected, atol=2e-4)
    kinds = [type(each) for each in loaded(quantized)[1].layers[0].qkv.weights]
    assert kinds == [TileScaled, Dense, TileScaled]
