"""Gemma 3 (text): most layers have a window and turn faster, queries and keys are normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import struct

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import PagedKVCache, Pages
from paged.errors import ConfigError
from paged.models import gemma2
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import expect, number, optional_number, shown
from paged.models.layers import (
    DecoderParams,
    PostNormLayerParams,
    decoder_specs,
    merge_heads,
    offset_norm,
    offset_rms_norm,
    run_layers,
    split_qkv,
)
from paged.models.rope import Rotation, rotate, rotation

DEFAULTS: dict[str, Any] = {
    **gemma2.DEFAULTS,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}


@dataclass(frozen=True)
class Extras:
    """Settings of Gemma 3.

    Attributes:
        query_scale: multiplies q·k.
        logit_cap: bound of logits; None for none.
        local_theta: base of the rotary frequencies, never scaled, of layers with a window.
    """

    query_scale: float
    logit_cap: float | None
    local_theta: float


@struct.dataclass
class Gemma3LayerParams(PostNormLayerParams):
    """Weights of one layer.

    Attributes:
        q_norm, k_norm: [E], shared by all heads.
    """

    q_norm: jax.Array
    k_norm: jax.Array


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "use_bidirectional_attention", False)
    expect(data, "attn_logit_softcapping", None)
    local = {"rope_theta": data["rope_local_base_freq"], **_rope_of("sliding_attention", data)}
    expect(local, "rope_type", "default")
    extras = Extras(
        query_scale=number(data, "query_pre_attn_scalar") ** -0.5,
        logit_cap=optional_number(data, "final_logit_softcapping"),
        local_theta=number(local, "rope_theta"),
    )
    full, activation = _rope_of("full_attention", data), data["hidden_activation"]
    config = parse_config({**data, "rope_parameters": full, "hidden_act": activation}, extras)
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "linear":
        return config
    # Here, unlike in Llama's files, the length that scaling leads to is written down.
    return replace(
        config, max_position_embeddings=int(config.max_position_embeddings / scaling.factor)
    )


def _rope_of(layer_type: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of the layers of a type, as new files have them; empty for old files."""
    given = data.get("rope_parameters") or {}
    rope = (given.get(layer_type) or {}) if isinstance(given, dict) else given
    if not isinstance(rope, dict):
        raise ConfigError(f"the rope settings must be objects, found {shown(rope)}")
    return rope


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config), norm=offset_norm)


def _layer_specs(config: ModelConfig, index: int) -> Gemma3LayerParams:
    prefix = f"model.layers.{index}.self_attn"
    return Gemma3LayerParams(
        **vars(gemma2.post_norm_layer_specs(config, index)),
        q_norm=offset_norm(f"{prefix}.q_norm", config.head_dim),
        k_norm=offset_norm(f"{prefix}.k_norm", config.head_dim),
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: Gemma3LayerParams,
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
    q, k, v = split_qkv(params.qkv(offset_rms_norm(x, params.attention_norm, eps)))
    q = rotate(offset_rms_norm(q, params.q_norm, eps), angles)
    k = rotate(offset_rms_norm(k, params.k_norm, eps), angles)
    scoring = Scoring(config.extras.query_scale, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x += offset_rms_norm(params.out(merge_heads(attended)), params.attention_post_norm, eps)
    normed = offset_rms_norm(x, params.mlp_norm, eps)
    out = params.down(params.gate_up.gated(normed, config.hidden_act))
    return x + offset_rms_norm(out, params.mlp_post_norm, eps), pages


def forward(
    params: DecoderParams,
    config: ModelConfig,
    tokens: jax.Array,
    cache: PagedKVCache,
    meta: AttentionMetadata,
) -> tuple[jax.Array, PagedKVCache]:
    """See `paged.models.registry.Family`."""
    local_config = replace(config, rope_theta=config.extras.local_theta, rope_scaling=None)
    whole, local = (rotation(each, meta.positions) for each in (config, local_config))
    angles = [local if window else whole for window in config.windows]
    x = params.embedding.lookup(tokens) * config.hidden_size**0.5
    x, cache = run_layers(layer, params, config, x, cache, meta, angles)
    return offset_rms_norm(x, params.final_norm, config.norm_eps), cache
