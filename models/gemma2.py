"""Gemma 2: scores and logits are capped, every other layer has a window, and norms stand on both
sides of attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import Pages
from paged.models import gemma
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import expect, number, optional_number
from paged.models.layers import (
    DecoderParams,
    PostNormLayerParams,
    capped,
    decoder_specs,
    layer_specs,
    logits,
    merge_heads,
    offset_norm,
    offset_rms_norm,
    split_qkv,
)
from paged.models.rope import Rotation, rotate

DEFAULTS: dict[str, Any] = {
    **gemma.DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
}


@dataclass(frozen=True)
class Extras:
    """Settings of Gemma 2.

    Attributes:
        query_scale: multiplies q·k.
        score_cap, logit_cap: bounds of scores and of logits; None for none.
    """

    query_scale: float
    score_cap: float | None
    logit_cap: float | None


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "use_bidirectional_attention", False)
    extras = Extras(
        query_scale=number(data, "query_pre_attn_scalar") ** -0.5,
        score_cap=optional_number(data, "attn_logit_softcapping"),
        logit_cap=optional_number(data, "final_logit_softcapping"),
    )
    return parse_config({**data, "hidden_act": data["hidden_activation"]}, extras)


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(post_norm_layer_specs, config), norm=offset_norm)


def post_norm_layer_specs(config: ModelConfig, index: int) -> PostNormLayerParams:
    """Description of one layer."""
    prefix, bias = f"model.layers.{index}", config.attention_bias
    plain = layer_specs(config, index, norm=offset_norm, qkv_bias=bias, out_bias=bias)
    post_attention, pre_mlp, post_mlp = (
        offset_norm(f"{prefix}.{name}_layernorm", config.hidden_size)
        for name in ("post_attention", "pre_feedforward", "post_feedforward")
    )
    return PostNormLayerParams(
        **vars(plain) | {"mlp_norm": pre_mlp},
        attention_post_norm=post_attention,
        mlp_post_norm=post_mlp,
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
    eps, extras = config.norm_eps, config.extras
    q, k, v = split_qkv(params.qkv(offset_rms_norm(x, params.attention_norm, eps)))
    q, k = rotate(q, angles), rotate(k, angles)
    scoring = Scoring(extras.query_scale, window, extras.score_cap)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x += offset_rms_norm(params.out(merge_heads(attended)), params.attention_post_norm, eps)
    normed = offset_rms_norm(x, params.mlp_norm, eps)
    out = params.down(params.gate_up.gated(normed, config.hidden_act))
    return x + offset_rms_norm(out, params.mlp_post_norm, eps), pages


forward = partial(gemma.decode, layer)


def capped_logits(params: DecoderParams, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits [R, V] float32 of hidden states [R, D]."""
    return capped(logits(params, config, hidden), config.extras.logit_cap)
