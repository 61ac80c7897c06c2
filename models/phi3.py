"""Phi-3, Phi-3.5 and Phi-4: Llama's layers, whose checkpoints hold projections already joined."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from paged.models.config import ModelConfig
from paged.models.layers import (
    DecoderParams,
    LayerParams,
    decoder_specs,
    joined_gate_up_projection,
    joined_qkv_projection,
    layer_specs,
)
from paged.models.llama import forward

__all__ = ["DEFAULTS", "forward", "specs"]

# A window in config.json applies to every layer.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "use_sliding_window": True,
}


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config))


def _layer_specs(config: ModelConfig, index: int) -> LayerParams:
    prefix = f"model.layers.{index}"
    return replace(
        layer_specs(config, index),
        qkv=joined_qkv_projection(f"{prefix}.self_attn.qkv_proj", config, bias=False),
        gate_up=joined_gate_up_projection(f"{prefix}.mlp.gate_up_proj", config),
    )
