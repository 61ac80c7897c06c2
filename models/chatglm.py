"""ChatGLM2, ChatGLM3 and GLM-4-9B in the layout of their first releases: GLM under older names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import expect, number
from paged.models.glm import forward
from paged.models.layers import (
    DecoderParams,
    LayerParams,
    joined_gate_up_projection,
    joined_qkv_projection,
    norm,
)
from paged.models.weights import embedding, linear

__all__ = ["DEFAULTS", "configure", "forward", "specs"]

DEFAULTS: dict[str, Any] = {
    "add_qkv_bias": False,
    "ffn_hidden_size": 13696,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-5,
    "multi_query_group_num": 1,
    "num_attention_heads": 32,
    "num_layers": 28,
    "padded_vocab_size": 65024,
    "rope_ratio": 1,
    "seq_length": 2048,
}
# By the names of all other families.
_RENAMED = {
    "attention_bias": "add_qkv_bias",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "seq_length",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "multi_query_group_num",
    "rms_norm_eps": "layernorm_epsilon",
    "vocab_size": "padded_vocab_size",
}
# What these models could be told to do otherwise, and were not.
_FIXED = {
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "multi_query_attention": True,
    "original_rope": True,
    "post_layer_norm": True,
    "pre_seq_len": None,
    "quantization_bit": 0,
    "rmsnorm": True,
}


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """The configuration. Its ratio stretches the base of rotary frequencies."""
    for key, value in _FIXED.items():
        expect(data, key, value)
    renamed = {name: data[old] for name, old in _RENAMED.items()}
    rope = {"rope_theta": 10000.0 * number(data, "rope_ratio"), "partial_rotary_factor": 0.5}
    return parse_config({**data, **renamed, **rope})


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    size, vocab_size = config.hidden_size, config.vocab_size
    head = linear("transformer.output_layer", size, vocab_size, axes=(None, "vocab"))
    return DecoderParams(
        embedding=embedding("transformer.embedding.word_embeddings.weight", vocab_size, size),
        layers=tuple(_layer_specs(config, index) for index in range(config.num_layers)),
        final_norm=norm("transformer.encoder.final_layernorm", size),
        head=None if config.tie_word_embeddings else head,
    )


def _layer_specs(config: ModelConfig, index: int) -> LayerParams:
    prefix, size = f"transformer.encoder.layers.{index}", config.hidden_size
    attention, heads = f"{prefix}.self_attention", config.num_heads * config.head_dim
    down, inner = f"{prefix}.mlp.dense_4h_to_h", config.intermediate_size
    return LayerParams(
        attention_norm=norm(f"{prefix}.input_layernorm", size),
        qkv=joined_qkv_projection(
            f"{attention}.query_key_value", config, bias=config.attention_bias
        ),
        out=linear(f"{attention}.dense", heads, size, axes=("heads", None)),
        mlp_norm=norm(f"{prefix}.post_attention_layernorm", size),
        gate_up=joined_gate_up_projection(f"{prefix}.mlp.dense_h_to_4h", config),
        down=linear(down, inner, size, axes=("mlp", None)),
    )
