"""Llama (1 to 3.x): pre-norm layers of grouped-query attention and a SwiGLU MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import Pages
from paged.models.config import ModelConfig
from paged.models.layers import (
    AttentionParams,
    DecoderParams,
    LayerParams,
    add_mlp,
    decode,
    decoder_specs,
    layer_specs,
    merge_heads,
    rms_norm,
    split_qkv,
)
from paged.models.rope import Rotation, rotate

DEFAULTS: dict[str, Any] = {}


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    bias = config.attention_bias
    layer = partial(layer_specs, config, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias)
    return decoder_specs(config, layer)


def attend(
    params: AttentionParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Pages]:
    """The attention of `layer`, added to x [T, D]; for `sinks` see `paged_attention`."""
    normed = rms_norm(x, params.attention_norm, config.norm_eps)
    q, k, v = split_qkv(params.qkv(normed))
    q, k = rotate(q, angles), rotate(k, angles)
    scoring = Scoring(config.head_dim**-0.5, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring, sinks)
    return params.out.added_to(x, merge_heads(attended)), pages


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
    x, pages = attend(params, x, pages, angles, meta, config=config, window=window)
    return add_mlp(params, x, config), pages


forward = partial(decode, layer)
