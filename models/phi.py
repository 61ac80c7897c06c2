"""Phi-1, Phi-1.5 and Phi-2: attention and MLP read the same norm, and biases are everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import struct

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import Pages
from paged.models.activations import activate
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import expect
from paged.models.layers import (
    DecoderParams,
    LayerNorm,
    biased_norm,
    decoder_specs,
    merge_heads,
    qkv_projection,
    split_qkv,
)
from paged.models.rope import Rotation, rotate
from paged.models.starcoder2 import decode
from paged.models.weights import Linear, linear

DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
}


@struct.dataclass
class PhiLayerParams:
    """Weights of one layer; for `qkv` and `out` see `paged.models.layers.LayerParams`.

    Attributes:
        up: D to F.
        down: F to D.
    """

    norm: LayerNorm
    qkv: Linear
    out: Linear
    up: Linear
    down: Linear


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "hidden_act", "gelu_new")
    expect(data, "qk_layernorm", False)
    expect(data, "tie_word_embeddings", False)
    return parse_config({**data, "rms_norm_eps": data["layer_norm_eps"]})


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    size, vocab_size = config.hidden_size, config.vocab_size
    return replace(
        decoder_specs(config, partial(_layer_specs, config)),
        final_norm=biased_norm("model.final_layernorm", size),
        head=linear("lm_head", size, vocab_size, bias=True, axes=(None, "vocab")),
    )


def _layer_specs(config: ModelConfig, index: int) -> PhiLayerParams:
    prefix, size, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    return PhiLayerParams(
        norm=biased_norm(f"{prefix}.input_layernorm", size),
        qkv=qkv_projection(f"{prefix}.self_attn", config, bias=True),
        out=linear(f"{prefix}.self_attn.dense", heads, size, bias=True, axes=("heads", None)),
        up=linear(f"{prefix}.mlp.fc1", size, inner, bias=True, axes=(None, "mlp")),
        down=linear(f"{prefix}.mlp.fc2", inner, size, bias=True, axes=("mlp", None)),
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: PhiLayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`."""
    normed = params.norm(x, config.norm_eps)
    q, k, v = split_qkv(params.qkv(normed))
    q, k = rotate(q, angles), rotate(k, angles)
    scoring = Scoring(config.head_dim**-0.5, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x = params.out.added_to(x, merge_heads(attended))
    inner = activate(params.up(normed), config.hidden_act)
    return params.down.added_to(x, inner), pages


forward = partial(decode, layer)
