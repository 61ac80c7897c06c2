"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with mixtures of experts, one of which all tokens share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from paged.attention import AttentionMetadata
from paged.cache import Pages
from paged.errors import ConfigError
from paged.models import llama
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import count, expect, flag, shown
from paged.models.experts import (
    Routing,
    SparseLayerParams,
    mix,
    mixture_specs,
    sparse_layer_specs,
)
from paged.models.layers import (
    DecoderParams,
    LayerParams,
    add_mlp,
    decode,
    decoder_specs,
    down_projection,
    gate_up_projection,
    layer_specs,
    rms_norm,
)
from paged.models.rope import Rotation
from paged.models.weights import Linear, linear

DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "qkv_bias": True,
    "shared_expert_intermediate_size": 5632,
}


@dataclass(frozen=True)
class Extras:
    """Settings of Qwen2-MoE.

    Attributes:
        routing: of the mixtures.
        sparse: whether each layer has a mixture, rather than an MLP.
        shared_size: F of the shared expert.
        qkv_bias: queries, keys and values have biases.
    """

    routing: Routing
    sparse: tuple[bool, ...]
    shared_size: int
    qkv_bias: bool


@struct.dataclass
class Qwen2MoeLayerParams(SparseLayerParams):
    """Weights of a layer with a mixture.

    Attributes:
        shared_gate_up: D to [2, F].
        shared_down: F to D.
        shared_weight: D to 1, by how much the shared expert counts.
    """

    shared_gate_up: Linear
    shared_down: Linear
    shared_weight: Linear


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "use_sliding_window", False)
    extras = Extras(
        routing=routing(data),
        sparse=sparse_layers(data),
        shared_size=count(data, "shared_expert_intermediate_size"),
        qkv_bias=flag(data, "qkv_bias"),
    )
    return parse_config(data, extras)


def routing(data: Mapping[str, Any]) -> Routing:
    """The settings of mixtures in a config.json of Qwen, old or new."""
    return Routing(
        num_experts=count(data, "num_local_experts", count(data, "num_experts")),
        num_chosen=count(data, "num_experts_per_tok"),
        expert_size=count(data, "moe_intermediate_size"),
        renormalise=flag(data, "norm_topk_prob"),
    )


def sparse_layers(data: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has a mixture: each `decoder_sparse_step`-th, but `mlp_only_layers`."""
    num_layers, step = count(data, "num_hidden_layers"), count(data, "decoder_sparse_step")
    plain = data.get("mlp_only_layers") or ()
    known = isinstance(plain, list | tuple) and all(
        type(each) is int and 0 <= each < num_layers for each in plain
    )
    if not known:
        raise ConfigError(
            f"mlp_only_layers must list layers from 0 to {num_layers - 1}, found {shown(plain)}"
        )
    return tuple(index not in plain and (index + 1) % step == 0 for index in range(num_layers))


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config))


def _layer_specs(config: ModelConfig, index: int) -> LayerParams | Qwen2MoeLayerParams:
    extras, prefix = config.extras, f"model.layers.{index}.mlp"
    plain = layer_specs(config, index, qkv_bias=extras.qkv_bias)
    if not extras.sparse[index]:
        return plain
    sparse = sparse_layer_specs(plain, mixture_specs(prefix, config, extras.routing))
    shared = replace(config, intermediate_size=extras.shared_size)
    return Qwen2MoeLayerParams(
        **vars(sparse),
        shared_gate_up=gate_up_projection(
            f"{prefix}.shared_expert", shared, bias=False, axis="shared_mlp"
        ),
        shared_down=down_projection(
            f"{prefix}.shared_expert", shared, bias=False, axis="shared_mlp"
        ),
        shared_weight=linear(f"{prefix}.shared_expert_gate", config.hidden_size, 1),
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: LayerParams | Qwen2MoeLayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`."""
    x, pages = llama.attend(params, x, pages, angles, meta, config=config, window=window)
    if isinstance(params, LayerParams):
        return add_mlp(params, x, config), pages
    normed = rms_norm(x, params.mlp_norm, config.norm_eps)
    mixed = mix(params.mixture, config.extras.routing, normed, meta, config.hidden_act)
    weight = jax.nn.sigmoid(params.shared_weight(normed, jnp.dtype(jnp.float32))).astype(x.dtype)
    shared = params.shared_down(params.shared_gate_up.gated(normed, config.hidden_act))
    return x + params.mixture.down.total(mixed + weight * shared), pages


forward = partial(decode, layer)
