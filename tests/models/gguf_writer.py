"""Writes the tiny models of the goldens as GGUF files, as a converter would."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.harness import tiny_tensors

Kind = gguf.GGMLQuantizationType
# By `model_type` in config.json.
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def write_gguf(
    path: Path,
    golden: dict[str, Any],
    *,
    kind: Kind = Kind.F32,
    extra: dict[str, np.ndarray] | None = None,
    rope: tuple[str, float] | None = None,
    kinds: dict[str, Kind] | None = None,
) -> Path:
    """Write the model of a golden, with matrices stored as `kind`, and vectors in float32.

    Args:
        extra: further tensors.
        rope: type and factor of rotary scaling, in place of the golden's.
        kinds: of matrices of a name, such as "attn_v", in place of `kind`.
    """
    config = golden["config"]
    name = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(path), name)
    _add_sizes(writer, config)
    _add_window_and_caps(writer, config)
    _add_experts(writer, config)
    _add_rope(writer, config, rope)
    for stored, tensor in (_stored_tensors(golden, name) | (extra or {})).items():
        own = (kinds or {}).get(stored.split(".")[-2], kind)
        kept = own if tensor.ndim > 1 else Kind.F32
        writer.add_tensor(stored, gguf.quants.quantize(tensor, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _add_window_and_caps(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if config["model_type"].startswith(("gemma", "phi3")):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_rope(
    writer: gguf.GGUFWriter, config: dict[str, Any], scaling: tuple[str, float] | None
) -> None:
    parameters = config["rope_parameters"]
    full = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] == "linear":
        scaling = scaling or ("linear", full["factor"])
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling[0]))
        writer.add_rope_scaling_factor(scaling[1])
    if "partial_rotary_factor" in full:
        size = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(size * full["partial_rotary_factor"]))
    if full["rope_type"] == "longrope":
        original = config["original_max_position_embeddings"]
        growth = math.log(config["max_position_embeddings"] / original)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + growth / math.log(original)))
        for length in ("long", "short"):
            factors = np.asarray(full[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _stored_tensors(golden: dict[str, Any], architecture: str) -> dict[str, np.ndarray]:
    """All tensors by their names in the file, as they are stored there."""
    config = golden["config"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stacks: dict[str, dict[int, np.ndarray]] = {}
    stored = {}
    for name, tensor in tiny_tensors(golden).items():
        expert = _EXPERT.search(name)
        given = names.get_name(_EXPERT.sub(".experts.", name), (".weight", ".bias"))
        assert given is not None, f"GGUF has no name for {name}"
        if architecture == "llama" and name.split(".")[-2] in heads:
            tensor = _interleaved(tensor, heads[name.split(".")[-2]])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        if expert:
            stacks.setdefault(given, {})[int(expert[1])] = tensor
        else:
            stored[given] = tensor
    for given, stack in stacks.items():
        stored[given] = np.stack([stack[index] for index in range(len(stack))])
    return stored


def _interleaved(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The row order that converters give q and k of Llama models."""
    rows = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return rows.swapaxes(1, 2).reshape(tensor.shape)
