"""GGUF's tensors kept as they are in the file: what they mean is what the format's package says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.errors import ConfigError
from paged.models.loading import ModelSource, resolve_model
from paged.models.quantized import (
    KEPT_TYPES,
    GgmlTensors,
    GroupShifted,
    Joined,
    ShiftedEmbedding,
    expanded_weights,
    published_quantization,
    weight_bytes,
)
from paged.models.quantized.shifted import HopperGroupShifted
from paged.models.weights import Dense, embedding, for_device, linear, param_bytes
from tests.models.gguf_writer import Kind, write_gguf
from tests.models.harness import Runner, load_golden, write_checkpoint
from tests.models.quantized.test_quantized_types import on_hopper
from tests.paged import aot

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
TOKENS = list(range(3, 20))


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def records(kind: str, rows: int, inputs: int) -> np.ndarray:
    """Rows of random records whose float16 numbers are finite."""
    record, size = gguf.GGML_QUANT_SIZES[kind_of(kind)]
    data = np.random.default_rng(rows).integers(0, 256, (rows, inputs // record, size), np.uint8)
    floats = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for place in floats.get(kind, (0, 2)[: 1 + kind.endswith("_1")]):
        data[..., place + 1] &= 0x3F  # of which a float16 is below 2
    return data.reshape(rows, -1)


def assembled(described: Any, data: np.ndarray) -> Any:
    leaves, structure = jax.tree.flatten(described)
    arrays = [leaf.assemble([jnp.asarray(data)], leaf.dtype_among(F32)) for leaf in leaves]
    assert [array.shape for array in arrays] == [leaf.shape for leaf in leaves]
    return jax.tree.unflatten(structure, arrays)


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_weights_mean_what_the_formats_package_says(kind):
    inputs, rows = 512, 7
    data = records(kind, rows, inputs)
    expected = gguf.dequantize(data, kind_of(kind))
    weight = assembled(GgmlTensors(kind).describe(linear("a", inputs, rows)), data)
    np.testing.assert_allclose(weight.expanded(F32).T, expected, rtol=1e-6, atol=1e-6)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, inputs)), F32)
    np.testing.assert_allclose(weight(x), x @ expected.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_embeddings_are_looked_up_and_multiply(kind):
    data = records(kind, 9, 256)
    table = gguf.dequantize(data, kind_of(kind))
    found = assembled(GgmlTensors(kind).describe_embedding(embedding("a.weight", 9, 256)), data)
    looked_up = found.lookup(jnp.array([8, 0, 99]))
    np.testing.assert_allclose(looked_up, table[[8, 0, 8]], rtol=1e-6, atol=1e-6)
    assert looked_up.dtype == found.dtype == F32
    np.testing.assert_allclose(found.unembed(table[:2], F32), table[:2] @ table.T, rtol=1e-3)


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_random_weights_are_near_those_that_were_drawn(kind):
    plain = linear("a", 512, 40)
    drawn = plain.kernel.random(jax.random.key(0), F32)  # type: ignore[attr-defined]
    described = GgmlTensors(kind).describe(plain)
    weight: Any = jax.tree.map(
        lambda spec: spec.random(jax.random.key(0), spec.dtype_among(F32)), described
    )
    assert jnp.std(weight.expanded(F32) - drawn) < 0.12 * jnp.std(drawn)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_a_hopper_gpu_multiplies_as_others_do(kind, monkeypatch):
    data = records(kind, 128, 256)
    weight = assembled(GgmlTensors(kind).describe(linear("a", 256, 128)), data)
    faster = on_hopper(weight, monkeypatch)
    assert type(faster) is (GroupShifted if kind == "Q6_K" else HopperGroupShifted)
    shapes = for_device(jax.eval_shape(lambda: weight), aot.H200.device)
    assert jax.eval_shape(lambda: faster) == shapes
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 256)), F32)
    expected = np.asarray(weight(x))
    np.testing.assert_allclose(faster(x), expected, atol=1e-3 * np.abs(expected).max())


def test_a_hopper_gpu_looks_embeddings_up_as_others_do():
    table = assembled(
        GgmlTensors("Q4_K").describe_embedding(embedding("a.weight", 128, 256)),
        records("Q4_K", 128, 256),
    )
    there = for_device(table, aot.H200.device)
    assert there.dtype == table.dtype
    tokens = jnp.array([3, 127])
    np.testing.assert_array_equal(there.lookup(tokens), table.lookup(tokens))
    assert expanded_weights({"embedding": table}, aot.H200.device) == []


def written(tmp_path: Path, kind: str, name: str, **others: Any) -> ModelSource:
    path = write_gguf(tmp_path / "model.gguf", load_golden(name), kind=kind_of(kind), **others)
    return resolve_model(path)


def check_answers(found: ModelSource, expected: ModelSource) -> None:
    runs = [Runner(each.config, each.load(F32, progress=False)) for each in (found, expected)]
    first, second = (run.step({0: TOKENS}) for run in runs)
    np.testing.assert_allclose(first, second, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama_tied", "Q4_1"), ("llama_bias", "Q8_0"), ("qwen2", "Q5_0")],
)
def test_a_model_answers_as_when_it_is_expanded(tmp_path, name, kind):
    source = written(tmp_path, kind, name)
    check_answers(source.quantized("gguf", ()), source)


def test_a_file_of_4_bits_takes_a_quarter_of_16(tmp_path):
    source = written(tmp_path, "Q4_0", "llama_wide")
    kept = source.quantized("gguf", ())
    params = kept.load(BF16, progress=False)
    found = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert found == param_bytes(kept.specs, BF16) == sum(weight_bytes(kept.specs, BF16))
    assert found < 0.3 * param_bytes(source.specs, BF16)
    assert weight_bytes(kept.specs, BF16).quantized > 0.99 * found


def test_what_is_multiplied_as_one_may_be_stored_in_several_ways(tmp_path):
    kinds = {"attn_v": Kind.Q8_0, "ffn_up": Kind.F16}
    source = written(tmp_path, "Q4_1", "llama_bias", kinds=kinds)
    kept = source.quantized("gguf", ())
    layer = kept.specs.layers[0]
    assert isinstance(layer.qkv, Joined)
    assert [type(each) for each in layer.qkv.weights] == [GroupShifted, GroupShifted]
    assert [type(each) for each in layer.gate_up.weights] == [GroupShifted, Dense]
    check_answers(kept, source)


def test_names_may_be_excluded(tmp_path):
    kept = written(tmp_path, "Q4_1", "llama_tied").quantized("gguf", ["*.down_proj", "*embed*"])
    assert isinstance(kept.specs.layers[0].down, Dense)
    assert isinstance(kept.specs.layers[0].qkv, GroupShifted)
    assert not isinstance(kept.specs.embedding, ShiftedEmbedding)


def test_a_converted_folder_says_how_its_weights_are_kept(tmp_path):
    kept = written(tmp_path, "Q4_1", "llama_tied").quantized("gguf", ["lm_head"])
    assert published_quantization(kept.config_json) == kept.config.quantization
    types = kept.config_json["quantization_config"]["types"]
    assert "model.embed_tokens" in types["Q4_1"]


def test_only_gguf_files_have_weights_to_keep(tmp_path):
    source = resolve_model(write_checkpoint(tmp_path, load_golden("llama")))
    with pytest.raises(ConfigError, match="is for GGUF files"):
        source.quantized("gguf", ())
