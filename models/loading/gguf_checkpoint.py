"""The model in a GGUF file: its configuration, and its weights by their Hugging Face names.

What a file calls things, and what its converter did to some weights, depends on its architecture:
one record for each says how, and everything else is common to all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from paged.errors import ConfigError
from paged.models.loading.checkpoint import CheckpointError, TensorInfo
from paged.models.loading.gguf import GgufFile
from paged.models.quantized import KEPT_TYPES, GgmlTensors, NamesRule, Quantization

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORM_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_JOINED_NAMES = _LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# A star stands for the number of an expert: files stack them all in one tensor.
_MIXTRAL_NAMES = _LAYER_NAMES | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
_QWEN_MOE_NAMES = _LAYER_NAMES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_LONG_DIVISORS, _SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
_ROPE_TENSORS = (_ROPE_DIVISORS, _LONG_DIVISORS, _SHORT_DIVISORS)
# Layers of the models that scale queries by the mean size of a head, which is not that of theirs.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


class GgufCheckpoint:
    """The weights of a GGUF file under their Hugging Face names and in that order of rows.

    Args:
        kept: names of tensors whose rows are given as bytes, as they lie in the file.

    Raises:
        CheckpointError: the file has a tensor that has no Hugging Face name.
    """

    def __init__(self, file: GgufFile, kept: Iterable[str] = ()) -> None:
        self._file = file
        self._kept = frozenset(kept)
        self._architecture = _architecture(file)
        self._places = dict(self._named())

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: self._info(name) for name in self._places}

    def quantization(self) -> Quantization:
        """How the file has its weights, as far as that can be kept."""
        modules: dict[str, list[str]] = {}
        for name, place in self._places.items():
            kind = self._file.tensors[place.stored].kind.name
            if kind in KEPT_TYPES:
                modules.setdefault(kind, []).append(name.removesuffix(".weight"))
        rules = [NamesRule(GgmlTensors(kind), frozenset(of)) for kind, of in modules.items()]
        return Quantization("gguf", tuple(rules))

    def as_described(self, specs: Any) -> GgufCheckpoint:
        """The same, of which described parameters that are made of bytes get those."""
        parts = [part for spec in jax.tree.leaves(specs) for part in spec.parts]
        return GgufCheckpoint(self._file, [part.name for part in parts if part.dtype == np.uint8])

    def read(self, name: str) -> np.ndarray:
        place = self._places[name]
        read = self._file.read_bytes if name in self._kept else self._file.read
        tensor = read(place.stored, place.expert).reshape(self.tensors[name].shape)
        if self._architecture.interleaved and ".q_proj." in name:
            return _half_split_rows(tensor, _key(self._file, "attention.head_count"))
        if self._architecture.interleaved and ".k_proj." in name:
            return _half_split_rows(tensor, _num_kv_heads(self._file))
        if self._architecture.offset_norms and name.endswith("norm.weight"):
            return tensor - np.float32(1)
        return tensor

    def _named(self) -> Iterator[tuple[str, _Place]]:
        for stored, tensor in self._file.tensors.items():
            if stored in _ROPE_TENSORS:
                continue
            name = _hf_name(stored, self._architecture.layer_names, self._file)
            if "*" not in name:
                yield name, _Place(stored)
                continue
            for expert in range(tensor.shape[0]):
                yield name.replace("*", str(expert)), _Place(stored, expert)

    def _info(self, name: str) -> TensorInfo:
        place, file = self._places[name], str(self._file.path)
        tensor = self._file.tensors[place.stored]
        shape = tensor.byte_shape if name in self._kept else tensor.shape
        if place.expert is not None:
            shape = shape[1:]
        elif "_inp_shexp" in place.stored and len(shape) == 1:
            # Of a projection to one number, which files may store as a vector.
            shape = (1, *shape)
        return TensorInfo(shape, file, np.dtype(np.uint8 if name in self._kept else np.float32))


class _Place(NamedTuple):
    """Where a tensor lies: its name in the file, and which of the stacked experts it is of."""

    stored: str
    expert: int | None = None


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The configuration in a file's metadata, as a config.json would state it.

    Raises:
        CheckpointError, ConfigError: the file is of a model that is not supported, or damaged.
    """
    architecture = _architecture(file)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight'")
    config: dict[str, Any] = {
        "architectures": [architecture.model],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": _key(file, "embedding_length"),
        "intermediate_size": _key(file, "feed_forward_length"),
        "num_hidden_layers": _key(file, "block_count"),
        "num_attention_heads": _key(file, "attention.head_count"),
        "num_key_value_heads": _num_kv_heads(file),
        "head_dim": _optional(file, "attention.key_length"),
        "max_position_embeddings": _key(file, "context_length"),
        "rope_theta": _optional(file, "rope.freq_base"),
        "partial_rotary_factor": _rotated_share(file, architecture),
        "rms_norm_eps": _key(file, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": "bfloat16",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    return config | _rope_scaling(file) | architecture.settings(file)


def _no_settings(file: GgufFile) -> dict[str, Any]:
    return {}


def _windowed(file: GgufFile) -> dict[str, Any]:
    """Phi-3's; 0 is written for none."""
    return {"sliding_window": _optional(file, "attention.sliding_window") or None}


def _gemma2(file: GgufFile) -> dict[str, Any]:
    size = _head_size(file)
    if _key(file, "block_count") == _GEMMA_27B_LAYERS[_name(file)]:
        size = _count(file, "embedding_length") / _count(file, "attention.head_count")
    return _windowed(file) | {
        "query_pre_attn_scalar": size,
        "attn_logit_softcapping": _optional(file, "attn_logit_softcapping"),
        "final_logit_softcapping": _optional(file, "final_logit_softcapping"),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    return _gemma2(file) | {"rope_theta": _optional(file, "rope.freq_base") or 1e6}


def _mixtral(file: GgufFile) -> dict[str, Any]:
    return {
        "num_local_experts": _key(file, "expert_count"),
        "num_experts_per_tok": _key(file, "expert_used_count"),
    }


def _qwen2_moe(file: GgufFile) -> dict[str, Any]:
    shared = _optional(file, "expert_shared_feed_forward_length")
    return _qwen3_moe(file) | {
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "shared_expert_intermediate_size": shared or _key(file, "feed_forward_length"),
    }


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    """What experts are weighted by is not in the metadata: their share among all, or, here, among
    the chosen.
    """
    return {
        "num_experts": _key(file, "expert_count"),
        "num_experts_per_tok": _key(file, "expert_used_count"),
        "moe_intermediate_size": _key(file, "expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _rotated_share(file: GgufFile, architecture: _Architecture) -> float:
    """Of a head's elements; files that do not say how many are rotated mean all."""
    if _optional(file, "rope.dimension_count") is None:
        return 1.0
    rotated, size = _count(file, "rope.dimension_count"), _head_size(file)
    if rotated == size:
        return 1.0
    if architecture.interleaved:  # rows are put in order for whole heads
        raise ConfigError(
            f"{file.path} rotates {rotated} of the {size:g} elements of a head; GGUF files of "
            f"{_name(file)} that do not rotate all are not supported"
        )
    return math.nextafter(rotated / size, math.inf)  # so that it times `size` is not rounded below


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    """Stored as a divisor for each frequency (Llama 3, and Phi-3 twice), or by type and factor."""
    original = _optional(file, "rope.scaling.original_context_length")
    scaling: dict[str, Any] = {"original_max_position_embeddings": original}
    if _ROPE_DIVISORS in file.tensors:
        divisors = tuple(file.read(_ROPE_DIVISORS).tolist())
        scaling |= {"rope_type": "factors", "divisors": divisors}
    elif _LONG_DIVISORS in file.tensors and _SHORT_DIVISORS in file.tensors:
        scaling |= {
            "rope_type": "longrope",
            "long_factor": tuple(file.read(_LONG_DIVISORS).tolist()),
            "short_factor": tuple(file.read(_SHORT_DIVISORS).tolist()),
            "attention_factor": _optional(file, "rope.scaling.attn_factor"),
        }
    else:
        kind = _optional(file, "rope.scaling.type") or "none"
        if kind == "none":
            return {}
        scaling |= {"rope_type": kind, "factor": _optional(file, "rope.scaling.factor")}
    return {"rope_scaling": scaling}


def _name(file: GgufFile) -> str:
    """The architecture that the file names.

    Raises:
        CheckpointError: it is not a supported one.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} has architecture {name!r}; GGUF files of {', '.join(_ARCHITECTURES)} "
            "are supported"
        )
    return name


def _optional(file: GgufFile, key: str) -> Any:
    """A metadata entry of the architecture, or None."""
    return file.metadata.get(f"{_name(file)}.{key}")


def _key(file: GgufFile, key: str) -> Any:
    value = _optional(file, key)
    if value is None:
        raise CheckpointError(f"{file.path} has no metadata entry '{_name(file)}.{key}'")
    return value


def _count(file: GgufFile, key: str) -> int:
    value = _key(file, key)
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{key!r} in {file.path} must be a whole number above 0, found {value!r}"
        )
    return value


def _num_kv_heads(file: GgufFile) -> int:
    return _optional(file, "attention.head_count_kv") or _key(file, "attention.head_count")


def _head_size(file: GgufFile) -> float:
    if _optional(file, "attention.key_length"):
        return _count(file, "attention.key_length")
    return _count(file, "embedding_length") / _count(file, "attention.head_count")


def _hf_name(stored: str, layer_names: Mapping[str, str], file: GgufFile) -> str:
    """The Hugging Face name of a tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj…"""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
    names = layer_names if match and match[1] else _GLOBAL_NAMES
    if not match or match[2] not in names:
        raise CheckpointError(
            f"{file.path} has a tensor {stored!r} that the model has no place for"
        )
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{names[match[2]]}.{match[3]}"


def _half_split_rows(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k, which GGUF interleaves for its rotation, in half-split order again."""
    shape = tensor.shape
    return tensor.reshape(num_heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


@dataclass(frozen=True)
class _Architecture:
    """What is particular to the files of one architecture.

    Attributes:
        model: the class in config.json that they are of.
        layer_names: of a tensor in a layer, from the file's to that of the Hugging Face checkpoint.
        settings: of config.json, besides those that all files have.
        interleaved: rows of q and k are in the order of a rotation of neighbouring elements.
        offset_norms: weights of norms have one added, which the model would add.
    """

    model: str
    layer_names: Mapping[str, str]
    settings: Callable[[GgufFile], dict[str, Any]] = _no_settings
    interleaved: bool = False
    offset_norms: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", _LAYER_NAMES, interleaved=True),
    "gemma": _Architecture("GemmaForCausalLM", _LAYER_NAMES, offset_norms=True),
    "gemma2": _Architecture("Gemma2ForCausalLM", _POST_NORM_NAMES, _gemma2, offset_norms=True),
    "gemma3": _Architecture("Gemma3ForCausalLM", _POST_NORM_NAMES, _gemma3, offset_norms=True),
    "phi3": _Architecture("Phi3ForCausalLM", _JOINED_NAMES, _windowed),
    "qwen2": _Architecture("Qwen2ForCausalLM", _LAYER_NAMES),
    "qwen2moe": _Architecture("Qwen2MoeForCausalLM", _QWEN_MOE_NAMES, _qwen2_moe),
    "qwen3": _Architecture("Qwen3ForCausalLM", _LAYER_NAMES),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", _QWEN_MOE_NAMES, _qwen3_moe),
}
_MIXTRAL = _Architecture("MixtralForCausalLM", _MIXTRAL_NAMES, _mixtral, interleaved=True)


def _architecture(file: GgufFile) -> _Architecture:
    """That of the file; Mixtral calls itself Llama, too."""
    name = _name(file)
    return _MIXTRAL if name == "llama" and _optional(file, "expert_count") else _ARCHITECTURES[name]
