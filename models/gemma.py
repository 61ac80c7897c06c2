"""Gemma: Llama's layers with a GeGLU MLP, scaled embeddings, and norms that scale by one more."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import PagedKVCache, Pages
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import expect
from paged.models.layers import (
    DecoderParams,
    Layer,
    LayerParams,
    decoder_specs,
    layer_specs,
    merge_heads,
    offset_norm,
    offset_rms_norm,
    run_layers,
    split_qkv,
)
from paged.models.rope import Rotation, rotate

DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """The configuration. The first releases call the activation "gelu", and mean this one."""
    expect(data, "hidden_act", "gelu", "gelu_pytorch_tanh")
    expect(data, "use_bidirectional_attention", False)
    return parse_config({**data, "hidden_act": "gelu_pytorch_tanh"})


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    bias = config.attention_bias
    layer = partial(layer_specs, config, norm=offset_norm, qkv_bias=bias, out_bias=bias)
    return decoder_specs(config, layer, norm=offset_norm)


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
    normed = offset_rms_norm(x, params.attention_norm, config.norm_eps)
    q, k, v = split_qkv(params.qkv(normed))
    q, k = rotate(q, angles), rotate(k, angles)
    scoring = Scoring(config.head_dim**-0.5, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x = params.out.added_to(x, merge_heads(attended))
    normed = offset_rms_norm(x, params.mlp_norm, config.norm_eps)
    return params.down.added_to(x, params.gate_up.gated(normed, config.hidden_act)), pages


def decode(
    layer: Layer,
    params: DecoderParams,
    config: ModelConfig,
    tokens: jax.Array,
    cache: PagedKVCache,
    meta: AttentionMetadata,
) -> tuple[jax.Array, PagedKVCache]:
    """As `paged.models.layers.decode`, with scaled embeddings and an offset final norm."""
    x = params.embedding.lookup(tokens) * config.hidden_size**0.5
    x, cache = run_layers(layer, params, config, x, cache, meta)
    return offset_rms_norm(x, params.final_norm, config.norm_eps), cache


forward = partial(decode, layer)
