"""StarCoder2: layer norms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from flax import struct

from paged.attention import AttentionMetadata, Scoring, paged_attention
from paged.cache import PagedKVCache, Pages
from paged.models.activations import activate
from paged.models.config import ModelConfig, parse_config
from paged.models.layers import (
    DecoderParams,
    Layer,
    LayerNorm,
    biased_norm,
    decoder_specs,
    merge_heads,
    out_projection,
    qkv_projection,
    run_layers,
    split_qkv,
)
from paged.models.rope import Rotation, rotate
from paged.models.weights import Linear, linear

# A window in config.json applies to every layer.
DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_bias": True,
    "use_sliding_window": True,
}


@struct.dataclass
class Starcoder2LayerParams:
    """Weights of one layer; for `qkv` and `out` see `paged.models.layers.LayerParams`.

    Attributes:
        up: D to F.
        down: F to D.
    """

    attention_norm: LayerNorm
    qkv: Linear
    out: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    bias = {"attention_bias": data["use_bias"], "mlp_bias": data["use_bias"]}
    return parse_config({**data, **bias, "rms_norm_eps": data["norm_epsilon"]})


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config), norm=biased_norm)


def _layer_specs(config: ModelConfig, index: int) -> Starcoder2LayerParams:
    prefix, size, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    attention, bias = f"{prefix}.self_attn", config.attention_bias
    up, down = f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj"
    return Starcoder2LayerParams(
        attention_norm=biased_norm(f"{prefix}.input_layernorm", size),
        qkv=qkv_projection(attention, config, bias=bias),
        out=out_projection(attention, config, bias=bias),
        mlp_norm=biased_norm(f"{prefix}.post_attention_layernorm", size),
        up=linear(up, size, inner, bias=config.mlp_bias, axes=(None, "mlp")),
        down=linear(down, inner, size, bias=config.mlp_bias, axes=("mlp", None)),
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: Starcoder2LayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`."""
    q, k, v = split_qkv(params.qkv(params.attention_norm(x, config.norm_eps)))
    q, k = rotate(q, angles), rotate(k, angles)
    scoring = Scoring(config.head_dim**-0.5, window)
    attended, pages = paged_attention(q, k, v, pages, meta, scoring)
    x = params.out.added_to(x, merge_heads(attended))
    inner = activate(params.up(params.mlp_norm(x, config.norm_eps)), config.hidden_act)
    return params.down.added_to(x, inner), pages


def decode(
    layer: Layer,
    params: DecoderParams,
    config: ModelConfig,
    tokens: jax.Array,
    cache: PagedKVCache,
    meta: AttentionMetadata,
) -> tuple[jax.Array, PagedKVCache]:
    """As `paged.models.layers.decode`, with a layer norm at the end."""
    x = params.embedding.lookup(tokens)
    x, cache = run_layers(layer, params, config, x, cache, meta)
    return params.final_norm(x, config.norm_eps), cache


forward = partial(decode, layer)
