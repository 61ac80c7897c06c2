"""GLM-4-0414 (9B and 32B): GLM with norms on both sides of attention and MLP."""

from __future__ import annotations

from functools import partial

import jax

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import Pages
from paged.models.config import ModelConfig
from paged.models.glm import DEFAULTS, pre_norm_layer_specs
from paged.models.layers import (
    DecoderParams,
    PostNormLayerParams,
    decode,
    decoder_specs,
    merge_heads,
    norm,
    rms_norm,
    split_qkv,
)
from paged.models.rope import Rotation, rotate_pairs

__all__ = ["DEFAULTS", "forward", "specs"]


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config))


def _layer_specs(config: ModelConfig, index: int) -> PostNormLayerParams:
    prefix = f"model.layers.{index}"
    return PostNormLayerParams(
        **vars(pre_norm_layer_specs(config, index)),
        attention_post_norm=norm(f"{prefix}.post_self_attn_layernorm", config.hidden_size),
        mlp_post_norm=norm(f"{prefix}.post_mlp_layernorm", config.hidden_size),
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: PostNormLayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`."""
    eps = config.norm_eps
    q, k, v = split_qkv(params.qkv(rms_norm(x, params.attention_norm, eps)))
    q, k = rotate_pairs(q, angles), rotate_pairs(k, angles)
    scoring = Scoring(config.head_dim**-0.5, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x += rms_norm(params.out(merge_heads(attended)), params.attention_post_norm, eps)
    gated = params.gate_up.gated(rms_norm(x, params.mlp_norm, eps), config.hidden_act)
    return x + rms_norm(params.down(gated), params.mlp_post_norm, eps), pages


forward = partial(decode, layer)
