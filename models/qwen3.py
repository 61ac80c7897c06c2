"""Qwen3 (dense): each query and key head is normalised before it is rotated."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import struct

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import Pages
from paged.models import layers
from paged.models.config import ModelConfig
from paged.models.layers import (
    AttentionParams,
    DecoderParams,
    LayerParams,
    add_mlp,
    decode,
    decoder_specs,
    merge_heads,
    norm,
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
class Qwen3AttentionParams(AttentionParams):
    """Weights of the attention of one layer.

    Attributes:
        q_norm, k_norm: [E], shared by all heads.
    """

    q_norm: jax.Array
    k_norm: jax.Array


@struct.dataclass
class Qwen3LayerParams(LayerParams, Qwen3AttentionParams):
    """Weights of one layer."""


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(layer_specs, config))


def layer_specs(config: ModelConfig, index: int) -> Qwen3LayerParams:
    """Description of one layer."""
    prefix, bias = f"model.layers.{index}.self_attn", config.attention_bias
    return Qwen3LayerParams(
        **vars(layers.layer_specs(config, index, qkv_bias=bias, out_bias=bias)),
        q_norm=norm(f"{prefix}.q_norm", config.head_dim),
        k_norm=norm(f"{prefix}.k_norm", config.head_dim),
    )


def attend(
    params: Qwen3AttentionParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """The attention of `layer`, added to x [T, D]."""
    normed = rms_norm(x, params.attention_norm, config.norm_eps)
    q, k, v = split_qkv(params.qkv(normed))
    q = rotate(rms_norm(q, params.q_norm, config.norm_eps), angles)
    k = rotate(rms_norm(k, params.k_norm, config.norm_eps), angles)
    scoring = Scoring(config.head_dim**-0.5, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    return params.out.added_to(x, merge_heads(attended)), pages


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: Qwen3LayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`."""
    x, pages = attend(params, x, pages, angles, meta, config=config, window=window)
    return add_mlp(params, x, config), pages


forward = partial(decode, layer)
