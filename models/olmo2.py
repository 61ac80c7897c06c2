"""OLMo 2: norms of what attention and MLP add, not of what they read, and of all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import struct

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import Pages
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import expect
from paged.models.layers import (
    DecoderParams,
    LayerParams,
    decode,
    decoder_specs,
    layer_specs,
    merge_heads,
    norm,
    rms_norm,
    split_qkv,
)
from paged.models.rope import Rotation, rotate
from paged.models.weights import vector

DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


@struct.dataclass
class Olmo2LayerParams(LayerParams):
    """Weights of one layer; `attention_norm` and `mlp_norm` are of what these add.

    Attributes:
        q_norm: [Hq * E]; k_norm: [Hkv * E].
    """

    q_norm: jax.Array
    k_norm: jax.Array


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "clip_qkv", None)
    return parse_config(data)


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config))


def _layer_specs(config: ModelConfig, index: int) -> Olmo2LayerParams:
    prefix, bias = f"model.layers.{index}", config.attention_bias
    plain = replace(
        layer_specs(config, index, qkv_bias=bias, out_bias=bias),
        attention_norm=norm(f"{prefix}.post_attention_layernorm", config.hidden_size),
        mlp_norm=norm(f"{prefix}.post_feedforward_layernorm", config.hidden_size),
    )
    return Olmo2LayerParams(
        **vars(plain),
        q_norm=_joint_norm(f"{prefix}.self_attn.q_norm", config.num_heads * config.head_dim),
        k_norm=_joint_norm(f"{prefix}.self_attn.k_norm", config.num_kv_heads * config.head_dim),
    )


def _joint_norm(name: str, size: int) -> Any:
    """Description of the weight of a norm of all heads as one, which devices cannot share out."""
    return vector(f"{name}.weight", size, "ones", "joint_heads")


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: Olmo2LayerParams,
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
    q, k, v = split_qkv(params.qkv(x))
    q = rotate(rms_norm(merge_heads(q), params.q_norm, eps).reshape(q.shape), angles)
    k = rotate(rms_norm(merge_heads(k), params.k_norm, eps).reshape(k.shape), angles)
    scoring = Scoring(config.head_dim**-0.5, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x += rms_norm(params.out(merge_heads(attended)), params.attention_norm, eps)
    out = params.down(params.gate_up.gated(x, config.hidden_act))
    return x + rms_norm(out, params.mlp_norm, eps), pages


forward = partial(decode, layer)
