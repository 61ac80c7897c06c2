"""GGUF files: the same model as the Hugging Face folder it was converted from, or a clear no."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged.errors import ConfigError
from paged.models.config import ModelConfig
from paged.models.loading import CheckpointError, ModelSource, resolve_model
from paged.models.loading.gguf import GgufFile
from paged.models.loading.gguf_checkpoint import GgufCheckpoint, gguf_config
from paged.models.registry import model_config
from paged.models.rope import attention_factor, rope_frequencies
from tests.models.gguf_writer import write_gguf
from tests.models.harness import Runner, load_golden, tiny_tensors, write_checkpoint

MODELS = [
    *("llama", "llama_bias", "llama_tied", "mixtral", "mixtral_window_tied"),
    *("gemma", "gemma2", "gemma3"),
    *("phi3", "phi3_longrope_short_tied", "phi3_longrope_long"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
]
# Python can write these, and read the others too.
WRITABLE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    """How tensors are stored, by name."""
    return gguf.GGMLQuantizationType[name]


def golden_for_gguf(name: str) -> dict[str, Any]:
    """A golden, but for what GGUF files do not say: they leave it to who knows the model."""
    golden = load_golden(name)
    config = golden["config"]
    if "query_pre_attn_scalar" in config:
        config["query_pre_attn_scalar"] = config["head_dim"]
    if config["model_type"] == "mixtral":
        config["sliding_window"] = None
    return golden


def logprobs_of(source: ModelSource, golden: dict[str, Any]) -> np.ndarray:
    """Log-probabilities [T, V] of a part of its prompt that is longer than its windows."""
    runner = Runner(source.config, source.load(jnp.float32, progress=False))
    return runner.step({0: golden["prompt"][:40]})


@pytest.mark.parametrize("name", MODELS)
def test_reads_back_what_was_converted(tmp_path, name):
    golden = golden_for_gguf(name)
    checkpoint = GgufCheckpoint(GgufFile(write_gguf(tmp_path / "m.gguf", golden)))
    expected = tiny_tensors(golden)
    assert set(checkpoint.tensors) == set(expected)
    for tensor, values in expected.items():
        assert checkpoint.tensors[tensor].shape == values.shape
        np.testing.assert_allclose(checkpoint.read(tensor), values, atol=3e-7, rtol=0)


def rounded(config: ModelConfig) -> list[Any]:
    """All of its values but those that files do not hold, or that are tested by themselves."""
    unsaid: dict[str, Any] = {"dtype": "", "bos_token_id": None, "eos_token_ids": ()}
    unsaid |= {"rope_scaling": None}
    leaves = jax.tree.leaves(asdict(replace(config, attention_bias=False, **unsaid)))
    return [f"{leaf:.6g}" if isinstance(leaf, float) else leaf for leaf in leaves]


@pytest.mark.parametrize("name", MODELS)
def test_means_the_same_configuration(tmp_path, name):
    """But for what the numbers lose that files keep in float32."""
    golden = golden_for_gguf(name)
    found = resolve_model(write_gguf(tmp_path / "m.gguf", golden)).config
    assert rounded(found) == rounded(model_config(golden["config"]))


@pytest.mark.parametrize(
    "name",
    [
        *("llama_tied", "mixtral", "gemma", "gemma2", "gemma3", "phi3"),
        *("phi3_longrope_long", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    ],
)
def test_runs_like_the_original(tmp_path, name):
    golden = golden_for_gguf(name)
    original = resolve_model(write_checkpoint(tmp_path / "original", golden))
    converted = resolve_model(write_gguf(tmp_path / "m.gguf", golden))
    np.testing.assert_allclose(
        logprobs_of(converted, golden), logprobs_of(original, golden), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", WRITABLE)
def test_expands_quantised_tensors(tmp_path, kind):
    golden = load_golden("llama")
    path = write_gguf(tmp_path / "m.gguf", golden, kind=kind_of(kind))
    name = "model.layers.0.self_attn.q_proj.weight"
    exact, read = tiny_tensors(golden)[name], GgufCheckpoint(GgufFile(path)).read(name)
    assert read.dtype == np.float32
    assert np.abs(read - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["F32", *WRITABLE, *K_QUANTS])
def test_expands_what_is_stored_as_the_reference_does(tmp_path, kind):
    """Random bytes, of three stacked matrices of 5 rows; float16 scales among them stay finite."""
    elements, size = gguf.GGML_QUANT_SIZES[kind_of(kind)]
    shape = (3, 5, 2 * max(elements, 128) // elements * size)
    stored = np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8) & 0xBB
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("odd", np.ones(3, np.float32))
    writer.add_tensor("it", stored, raw_dtype=kind_of(kind))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.write_tensors_to_file()
    writer.close()
    file, expected = (
        GgufFile(tmp_path / "x.gguf"),
        gguf.dequantize(stored, kind_of(kind)),
    )
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(file.read("it"), expected)
    np.testing.assert_array_equal(file.read("it", 2), expected[2])


def test_types_that_nothing_expands_are_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", load_golden("llama"))
    file = GgufFile(path)
    file.tensors["output.weight"] = replace(file.tensors["output.weight"], kind=kind_of("I8"))
    with pytest.raises(CheckpointError, match=r"'output\.weight'.*has type I8"):
        file.read("output.weight")


def test_llama3_frequencies_come_as_divisors(tmp_path):
    golden = load_golden("llama")
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", golden, extra={"rope_freqs.weight": divisors})
    source = resolve_model(path)
    plain = rope_frequencies(resolve_model(write_gguf(tmp_path / "p.gguf", golden)).config)
    np.testing.assert_allclose(rope_frequencies(source.config), plain / divisors)
    source.load(jnp.float32, progress=False)


def test_rope_scaling_is_read(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", load_golden("llama"), rope=("linear", 4.0))
    scaling = resolve_model(path).config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)


def test_rope_factors_are_longropes(tmp_path):
    golden = load_golden("phi3_longrope_long")
    found = resolve_model(write_gguf(tmp_path / "m.gguf", golden)).config.rope_scaling
    expected = model_config(golden["config"]).rope_scaling
    assert found is not None
    assert expected is not None
    assert found.kind == "longrope"
    assert found.original_max_position == 32
    assert found.divisors == pytest.approx(expected.divisors)
    assert found.short_divisors == pytest.approx(expected.short_divisors)
    assert attention_factor(found) == pytest.approx(attention_factor(expected))


def test_partial_rotation_of_llama_is_refused(tmp_path):
    file = GgufFile(write_gguf(tmp_path / "m.gguf", load_golden("llama")))
    file.metadata["llama.rope.dimension_count"] = 16
    model_config(gguf_config(file))
    file.metadata["llama.rope.dimension_count"] = 8
    with pytest.raises(ConfigError, match="8 of the 16 elements of a head"):
        gguf_config(file)


def test_the_largest_gemmas_scale_by_another_size_of_a_head(tmp_path):
    file = GgufFile(write_gguf(tmp_path / "m.gguf", load_golden("gemma2")))
    assert gguf_config(file)["query_pre_attn_scalar"] == 20
    file.metadata["gemma2.block_count"] = 46
    assert gguf_config(file)["query_pre_attn_scalar"] == 72 / 6


def test_unknown_architecture_is_refused(tmp_path):
    file = GgufFile(write_gguf(tmp_path / "m.gguf", load_golden("llama")))
    file.metadata["general.architecture"] = "mpt"
    with pytest.raises(CheckpointError, match=r"'mpt'.*llama"):
        gguf_config(file)


def test_tensor_without_a_place_is_refused(tmp_path):
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((2, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", load_golden("llama"), extra=extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        resolve_model(path)


@pytest.mark.parametrize("kept", [2, 6, 40, 300, 1000, -64, -1])
def test_truncation_is_named(tmp_path, kept):
    path = write_gguf(tmp_path / "m.gguf", load_golden("llama"))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"PK\x03\x04rest", "no GGUF file"),
        (b"GGUF" + (9).to_bytes(4, "little"), "version 9"),
    ],
)
def test_other_files_are_named(tmp_path, data, words):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        GgufFile(tmp_path / "x.gguf")


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_damage_to_the_header_is_more_than_a_refusal(tmp_path, data):
    """Whatever bytes change, the file is read, or refused by name: nothing else."""
    name = data.draw(st.sampled_from(["llama", "gemma3", "phi3_longrope_long", "qwen2_moe"]))
    path = tmp_path / f"{name}.gguf"
    if not path.exists():
        write_gguf(path, load_golden(name))
    damaged = bytearray(path.read_bytes())
    at = st.integers(4, 3000)
    word = st.sampled_from([0, 1, 8, 9, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
    for start, value in data.draw(st.lists(st.tuples(at, word), min_size=1, max_size=3)):
        size = data.draw(st.sampled_from([1, 4, 8]))
        damaged[start : start + size] = value.to_bytes(8, "little")[:size]
    (tmp_path / "x.gguf").write_bytes(damaged)
    with suppress(CheckpointError, ConfigError):
        opened = resolve_model(tmp_path / "x.gguf").open_checkpoint
        assert opened is not None
        opened()


def test_arrays_in_arrays_without_end_are_refused(tmp_path):
    """Each level is a type and a count."""
    level = struct.pack("<IQ", 9, 1)
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    (tmp_path / "x.gguf").write_bytes(start + level[:4] + level * 100_000)
    with pytest.raises(CheckpointError):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, [4]])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("llama", key) for key in ("attention.head_count", "embedding_length", "block_count")),
        *(("gemma2", key) for key in ("attention.key_length", "context_length")),
        *(("qwen3moe", key) for key in ("expert_count", "expert_feed_forward_length")),
    ],
)
def test_metadata_of_another_kind_is_refused(tmp_path, name, key, value):
    golden = load_golden("qwen3_moe" if name == "qwen3moe" else name)
    file = GgufFile(write_gguf(tmp_path / "m.gguf", golden))
    file.metadata[f"{name}.rope.dimension_count"] = 16
    file.metadata[f"{name}.{key}"] = value
    with pytest.raises((CheckpointError, ConfigError)):
        model_config(gguf_config(file))


def test_missing_metadata_is_named(tmp_path):
    file = GgufFile(write_gguf(tmp_path / "m.gguf", load_golden("llama")))
    del file.metadata["llama.context_length"]
    with pytest.raises(CheckpointError, match=r"llama\.context_length"):
        gguf_config(file)
