"""GGUF files: the same model as the Hugging Face folder it was converted from, or a clear no."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged.errors import ConfigError
from paged.models.loading import CheckpointError, resolve_model
from paged.models.loading.gguf import GgufCheckpoint, GgufFile, gguf_config
from paged.models.registry import model_config
from paged.models.rope import rope_frequencies
from tests.models.harness import Runner, load_golden, tiny_tensors

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The row order that converters give q and k of Llama models."""
    rows = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return rows.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    golden: dict[str, Any],
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    rope: tuple[str, float] | None = None,
) -> Path:
    """Write the model of a golden as a converter would, with matrices stored as `kind`."""
    config = golden["config"]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if rope is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope[0]))
        writer.add_rope_scaling_factor(rope[1])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tiny_tensors(golden).items():
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            tensor = interleave(tensor, heads[projection])
        stored = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor, stored)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "llama"),
        ("llama_bias", "llama"),
        ("llama_tied", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_reads_back_what_was_converted(tmp_path, name, architecture):
    golden = load_golden(name)
    file = GgufFile(write_gguf(tmp_path / "m.gguf", golden, architecture=architecture))
    checkpoint = GgufCheckpoint(file)
    expected = tiny_tensors(golden)
    assert set(checkpoint.tensors) == set(expected)
    for tensor, values in expected.items():
        assert checkpoint.tensors[tensor].shape == values.shape
        np.testing.assert_array_equal(checkpoint.read(tensor), values)


def test_runs_like_the_original(tmp_path):
    golden = load_golden("llama_tied")
    source = resolve_model(write_gguf(tmp_path / "m.gguf", golden))
    assert source.config.tie_word_embeddings
    runner = Runner(source.config, source.load(jnp.float32, progress=False))
    prompt = golden["prompt"][:40]
    table = runner.step({0: prompt})
    chosen = table[np.arange(39), prompt[1:]]
    np.testing.assert_allclose(chosen, golden["prompt_logprobs"][:39], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0", "Q4_1"])
def test_expands_quantised_tensors(tmp_path, kind):
    golden = load_golden("llama")
    number = gguf.GGMLQuantizationType[kind]
    checkpoint = GgufCheckpoint(GgufFile(write_gguf(tmp_path / "m.gguf", golden, kind=number)))
    name = "model.layers.0.self_attn.q_proj.weight"
    exact, read = tiny_tensors(golden)[name], checkpoint.read(name)
    assert read.dtype == np.float32
    assert np.abs(read - exact).max() < 0.1 * np.abs(exact).max()


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


def test_partial_rotation_is_refused(tmp_path):
    file = GgufFile(write_gguf(tmp_path / "m.gguf", load_golden("llama")))
    file.metadata["llama.rope.dimension_count"] = 16
    model_config(gguf_config(file))
    file.metadata["llama.rope.dimension_count"] = 8
    with pytest.raises(ConfigError, match="8 of the 16 elements of a head"):
        gguf_config(file)


def test_unknown_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", load_golden("llama"), architecture="gemma")
    with pytest.raises(CheckpointError, match=r"'gemma'.*llama"):
        gguf_config(GgufFile(path))


def test_tensor_without_a_place_is_refused(tmp_path):
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((2, 64), np.float32)}
    source = resolve_model(write_gguf(tmp_path / "m.gguf", load_golden("llama"), extra=extra))
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        source.load(jnp.float32)


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
    if not (tmp_path / "m.gguf").exists():
        write_gguf(tmp_path / "m.gguf", load_golden("llama"))
    damaged = bytearray((tmp_path / "m.gguf").read_bytes())
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
@pytest.mark.parametrize("key", ["attention.head_count", "embedding_length", "block_count"])
def test_metadata_of_another_kind_is_refused(tmp_path, key, value):
    file = GgufFile(write_gguf(tmp_path / "m.gguf", load_golden("llama")))
    file.metadata["llama.rope.dimension_count"] = 16
    file.metadata[f"llama.{key}"] = value
    with pytest.raises((CheckpointError, ConfigError)):
        model_config(gguf_config(file))


def test_missing_metadata_is_named(tmp_path):
    file = GgufFile(write_gguf(tmp_path / "m.gguf", load_golden("llama")))
    del file.metadata["llama.context_length"]
    with pytest.raises(CheckpointError, match=r"llama\.context_length"):
        gguf_config(file)
