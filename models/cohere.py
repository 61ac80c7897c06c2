"""Cohere Command R and R+: attention and MLP read the same norm, and neighbours rotate as pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from flax import struct

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import PagedKVCache, Pages
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import flag, number
from paged.models.layers import (
    DecoderParams,
    decoder_specs,
    down_projection,
    gate_up_projection,
    layer_norm,
    logits,
    merge_heads,
    norm,
    out_projection,
    qkv_projection,
    run_layers,
    split_qkv,
)
from paged.models.rope import Rotation, rotate_pairs
from paged.models.weights import Linear, ParamSpec, Part

DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Extras:
    """Settings of Cohere's models.

    Attributes:
        logit_scale: multiplies logits.
        qk_norm: queries and keys are normalised before they are rotated (R+).
    """

    logit_scale: float
    qk_norm: bool


@struct.dataclass
class CohereLayerParams:
    """Weights of one layer; for what is not listed see `paged.models.layers.LayerParams`.

    Attributes:
        norm: [D].
        q_norm: [Hq, E]; k_norm: [Hkv, E], each head by its own; None without.
    """

    norm: jax.Array
    qkv: Linear
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    out: Linear
    gate_up: Linear
    down: Linear


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """The configuration. Command R's context is `model_max_length`, where that is given."""
    extras = Extras(number(data, "logit_scale"), flag(data, "use_qk_norm"))
    length = data.get("model_max_length") or data["max_position_embeddings"]
    renamed = {"rms_norm_eps": data["layer_norm_eps"], "max_position_embeddings": length}
    return parse_config({**data, **renamed}, extras)


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config))


def _layer_specs(config: ModelConfig, index: int) -> CohereLayerParams:
    prefix, bias = f"model.layers.{index}", config.attention_bias
    attention, qk_norm = f"{prefix}.self_attn", config.extras.qk_norm
    return CohereLayerParams(
        norm=norm(f"{prefix}.input_layernorm", config.hidden_size),
        qkv=qkv_projection(attention, config, bias=bias),
        q_norm=_head_norm(f"{attention}.q_norm", config, "heads") if qk_norm else None,
        k_norm=_head_norm(f"{attention}.k_norm", config, "key_heads") if qk_norm else None,
        out=out_projection(attention, config, bias=bias),
        gate_up=gate_up_projection(f"{prefix}.mlp", config, bias=False),
        down=down_projection(f"{prefix}.mlp", config, bias=False),
    )


def _head_norm(name: str, config: ModelConfig, axis: Literal["heads", "key_heads"]) -> Any:
    """Description of the weight of a norm that each head has its own of."""
    shape = (config.num_heads if axis == "heads" else config.num_kv_heads, config.head_dim)
    return ParamSpec((Part(f"{name}.weight", shape, shape),), shape, (axis, None), "ones")


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: CohereLayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`."""
    normed = layer_norm(x, params.norm, None, config.norm_eps)
    q, k, v = split_qkv(params.qkv(normed))
    if params.q_norm is not None and params.k_norm is not None:
        q = layer_norm(q, params.q_norm, None, config.norm_eps)
        k = layer_norm(k, params.k_norm, None, config.norm_eps)
    q, k = rotate_pairs(q, angles), rotate_pairs(k, angles)
    scoring = Scoring(config.head_dim**-0.5, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x = params.out.added_to(x, merge_heads(attended))
    return params.down.added_to(x, params.gate_up.gated(normed, config.hidden_act)), pages


def forward(
    params: DecoderParams,
    config: ModelConfig,
    tokens: jax.Array,
    cache: PagedKVCache,
    meta: AttentionMetadata,
) -> tuple[jax.Array, PagedKVCache]:
    """See `paged.models.registry.Family`."""
    x = params.embedding.lookup(tokens)
    x, cache = run_layers(layer, params, config, x, cache, meta)
    return layer_norm(x, params.final_norm, None, config.norm_eps), cache


def scaled_logits(params: DecoderParams, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits [R, V] float32 of hidden states [R, D]."""
    return config.extras.logit_scale * logits(params, config, hidden)
