"""Qwen3 (dense): each query and key head is normalised before it is rotated."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import struct

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

DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


@struct.dataclass
class Qwen3LayerParams(LayerParams):
    """Weights of one layer.

    Attributes:
        q_norm, k_norm: [E], shared by all heads.
    """

    q_norm: jax.Array
    k_norm: jax.Array


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, tuple(_layer(config, i) for i in range(config.num_layers)))


def _layer(config: ModelConfig, index: int) -> Qwen3LayerParams:
    prefix = f"model.layers.{index}"
    return Qwen3LayerParams(
        attention_norm=norm(f"{prefix}.input_layernorm", config.hidden_size),
        qkv=qkv_projection(f"{prefix}.self_attn", config, bias=config.attention_bias),
        q_norm=norm(f"{prefix}.self_attn.q_norm", config.head_dim),
        k_norm=norm(f"{prefix}.self_attn.k_norm", config.head_dim),
        out=out_projection(f"{prefix}.self_attn", config, bias=config.attention_bias),
        mlp_norm=norm(f"{prefix}.post_attention_layernorm", config.hidden_size),
        gate_up=gate_up_projection(f"{prefix}.mlp", config, bias=False),
        down=down_projection(f"{prefix}.mlp", config, bias=False),
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: Qwen3LayerParams,
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
    q = rotate(rms_norm(q, params.q_norm, config.rms_norm_eps), angles)
    k = rotate(rms_norm(k, params.k_norm, config.rms_norm_eps), angles)
    scale = config.head_dim**-0.5
    attended, pages = paged_attention(q, k, v, pages, meta, scale=scale, window=window)
    x = x + params.out(merge_heads(attended))
    normed = rms_norm(x, params.mlp_norm, config.rms_norm_eps)
    return x + params.down(gated_silu(params.gate_up(normed))), pages


forward = partial(decode, layer)
