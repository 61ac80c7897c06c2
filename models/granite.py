"""Granite 3 (dense): Llama with factors on embeddings, scores, what layers add, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import PagedKVCache, Pages
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import number
from paged.models.layers import (
    DecoderParams,
    LayerParams,
    logits,
    merge_heads,
    rms_norm,
    run_layers,
    split_qkv,
)
from paged.models.llama import specs
from paged.models.rope import Rotation, rotate

__all__ = ["DEFAULTS", "configure", "forward", "scaled_logits", "specs"]

DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


@dataclass(frozen=True)
class Extras:
    """Settings of Granite.

    Attributes:
        embedding_factor: multiplies embeddings.
        query_scale: multiplies q·k.
        residual_factor: multiplies what attention and MLP add.
        logit_factor: multiplies logits.
    """

    embedding_factor: float
    query_scale: float
    residual_factor: float
    logit_factor: float


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    extras = Extras(
        embedding_factor=number(data, "embedding_multiplier"),
        query_scale=number(data, "attention_multiplier"),
        residual_factor=number(data, "residual_multiplier"),
        logit_factor=1 / number(data, "logits_scaling"),
    )
    return parse_config(data, extras)


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
    extras: Extras = config.extras
    q, k, v = split_qkv(params.qkv(rms_norm(x, params.attention_norm, config.norm_eps)))
    q, k = rotate(q, angles), rotate(k, angles)
    scoring = Scoring(extras.query_scale, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x += extras.residual_factor * params.out(merge_heads(attended))
    normed = rms_norm(x, params.mlp_norm, config.norm_eps)
    out = params.down(params.gate_up.gated(normed, config.hidden_act))
    return x + extras.residual_factor * out, pages


def forward(
    params: DecoderParams,
    config: ModelConfig,
    tokens: jax.Array,
    cache: PagedKVCache,
    meta: AttentionMetadata,
) -> tuple[jax.Array, PagedKVCache]:
    """See `paged.models.registry.Family`."""
    x = params.embedding.lookup(tokens) * config.extras.embedding_factor
    x, cache = run_layers(layer, params, config, x, cache, meta)
    return rms_norm(x, params.final_norm, config.norm_eps), cache


def scaled_logits(params: DecoderParams, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits [R, V] float32 of hidden states [R, D]."""
    return config.extras.logit_factor * logits(params, config, hidden)
