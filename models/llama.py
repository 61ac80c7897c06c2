"""Llama (1 to 3.x): pre-norm layers of grouped-query attention and a SwiGLU MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from paged.attention import AttentionMetadata, paged_attention
from paged.models.config import ModelConfig
from paged.models.layers import (
    DecoderParams,
    LayerParams,
    decode,
    decoder_specs,
    down_projection,
    gate_up_projection,
    gated_silu,
    merge_heads,
    norm,
    out_projection,
    qkv_projection,
    rms_norm,
    split_qkv,
)
from paged.models.rope import Rotation, rotate

DEFAULTS: dict[str, Any] = {}


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, tuple(layer_specs(config, i) for i in range(config.num_layers)))


def layer_specs(config: ModelConfig, index: int) -> LayerParams:
    """Description of one layer's parameters."""
    prefix = f"model.layers.{index}"
    return LayerParams(
        attention_norm=norm(f"{prefix}.input_layernorm", config.hidden_size),
        qkv=qkv_projection(f"{prefix}.self_attn", config, bias=config.attention_bias),
        out=out_projection(f"{prefix}.self_attn", config, bias=config.attention_bias),
        mlp_norm=norm(f"{prefix}.post_attention_layernorm", config.hidden_size),
        gate_up=gate_up_projection(f"{prefix}.mlp", config, bias=config.mlp_bias),
        down=down_projection(f"{prefix}.mlp", config, bias=config.mlp_bias),
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: LayerParams,
    x: jax.Array,
    pages: jax.Array,
    angles: Rotation,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """See `paged.models.layers.Layer`."""
    normed = rms_norm(x, params.attention_norm, config.rms_norm_eps)
    q, k, v = split_qkv(params.qkv(normed))
    q, k = rotate(q, angles), rotate(k, angles)
    scale = config.head_dim**-0.5
    attended, pages = paged_attention(q, k, v, pages, meta, scale=scale, window=window)
    x = x + params.out(merge_heads(attended))
    normed = rms_norm(x, params.mlp_norm, config.rms_norm_eps)
    return x + params.down(gated_silu(params.gate_up(normed))), pages


forward = partial(decode, layer)
