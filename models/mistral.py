"""Mistral: Llama's layers without biases, attending over a sliding window in its first release."""

from __future__ import annotations

from typing import Any

from paged.models.config import ModelConfig
from paged.models.layers import (
    DecoderParams,
    LayerParams,
    decoder_specs,
    down_projection,
    gate_up_projection,
    norm,
    out_projection,
    qkv_projection,
)
from paged.models.llama import forward

__all__ = ["DEFAULTS", "forward", "specs"]

# A window in config.json applies to every layer; null means none.
DEFAULTS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4096}


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, tuple(_layer(config, i) for i in range(config.num_layers)))


def _layer(config: ModelConfig, index: int) -> LayerParams:
    prefix = f"model.layers.{index}"
    return LayerParams(
        attention_norm=norm(f"{prefix}.input_layernorm", config.hidden_size),
        qkv=qkv_projection(f"{prefix}.self_attn", config, bias=False),
        out=out_projection(f"{prefix}.self_attn", config, bias=False),
        mlp_norm=norm(f"{prefix}.post_attention_layernorm", config.hidden_size),
        gate_up=gate_up_projection(f"{prefix}.mlp", config, bias=False),
        down=down_projection(f"{prefix}.mlp", config, bias=False),
    )
