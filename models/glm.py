"""GLM-4 (9B, first release) and GLM-Edge: Llama with neighbours as pairs in a head's first half."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import Pages
from paged.models.config import ModelConfig
from paged.models.layers import (
    DecoderParams,
    LayerParams,
    add_mlp,
    decode,
    decoder_specs,
    joined_gate_up_projection,
    layer_specs,
    merge_heads,
    rms_norm,
    split_qkv,
)
from paged.models.rope import Rotation, rotate_pairs

DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(pre_norm_layer_specs, config))


def pre_norm_layer_specs(config: ModelConfig, index: int) -> LayerParams:
    """Description of one layer."""
    return replace(
        layer_specs(config, index, qkv_bias=config.attention_bias),
        gate_up=joined_gate_up_projection(f"model.layers.{index}.mlp.gate_up_proj", config),
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: LayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`."""
    normed = rms_norm(x, params.attention_norm, config.norm_eps)
    q, k, v = split_qkv(params.qkv(normed))
    q, k = rotate_pairs(q, angles), rotate_pairs(k, angles)
    scoring = Scoring(config.head_dim**-0.5, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x = params.out.added_to(x, merge_heads(attended))
    return add_mlp(params, x, config), pages


forward = partial(decode, layer)
