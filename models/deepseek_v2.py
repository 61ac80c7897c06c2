"""DeepSeek-V2 and V2-Lite: latent attention, and mixtures beside experts that all tokens share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import struct

from paged.attention import AttentionMetadata
from paged.cache import Pages
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import count, expect, flag, number
from paged.models.experts import Mixture, mix, mixture_specs
from paged.models.group_routing import GroupRouting
from paged.models.latent_attention import (
    LatentAttentionParams,
    LatentShape,
    attend,
    latent_attention_specs,
)
from paged.models.layers import (
    DecoderParams,
    decode,
    decoder_specs,
    down_projection,
    gate_up_projection,
    norm,
    rms_norm,
)
from paged.models.rope import Rotation
from paged.models.weights import Linear

DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1407,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "v_head_dim": 128,
}


@dataclass(frozen=True)
class Extras:
    """Settings of DeepSeek.

    Attributes:
        attention: its sizes.
        routing: of the mixtures.
        sparse: whether each layer has a mixture.
        shared_size: F of the experts that all tokens share, taken together.
    """

    attention: LatentShape
    routing: GroupRouting
    sparse: tuple[bool, ...]
    shared_size: int


@struct.dataclass
class DeepseekLayerParams:
    """Weights of one layer.

    Attributes:
        attention: see `LatentAttentionParams`.
        mlp_norm: [D].
        gate_up: D to [2, F], of the MLP or, where there is a mixture, of the shared experts.
        down: F to D, likewise.
        mixture: None where there is an MLP alone.
        bias: [X] float32, see `Routing.choose`; None for none (V2).
    """

    attention: LatentAttentionParams
    mlp_norm: jax.Array
    gate_up: Linear
    down: Linear
    mixture: Mixture | None
    bias: jax.Array | None


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "scoring_func", "softmax")
    expect(data, "topk_method", "greedy", "group_limited_greedy")
    # Implementations differ in whether the factor comes on top.
    expect(data, "norm_topk_prob", False)
    grouped = data["topk_method"] == "group_limited_greedy"
    groups = (count(data, "n_group"), count(data, "topk_group")) if grouped else (1, 1)
    return latent_config(data, routing(data, groups, best=1, sigmoid=False))


def routing(
    data: Mapping[str, Any], groups: tuple[int, int], *, best: int, sigmoid: bool
) -> GroupRouting:
    """The settings of mixtures in a config.json, for groups there are and groups chosen."""
    return GroupRouting(
        num_experts=count(data, "n_routed_experts"),
        num_chosen=count(data, "num_experts_per_tok"),
        expert_size=count(data, "moe_intermediate_size"),
        renormalise=flag(data, "norm_topk_prob"),
        num_groups=groups[0],
        chosen_groups=groups[1],
        best=best,
        sigmoid=sigmoid,
        factor=number(data, "routed_scaling_factor"),
    )


def latent_config(data: Mapping[str, Any], routing: GroupRouting) -> ModelConfig:
    """The configuration of a model of either version."""
    for key in ("attention_bias", "mlp_bias"):
        expect(data, key, False)
    expect(data, "num_key_value_heads", count(data, "num_attention_heads"))
    shape = LatentShape.of(data)
    extras = Extras(
        attention=shape,
        routing=routing,
        sparse=sparse_layers(data),
        shared_size=routing.expert_size * count(data, "n_shared_experts"),
    )
    # To attention, all heads have one key: a row of a page.
    one_key = {"num_key_value_heads": 1, "head_dim": shape.row}
    # Half an element more, for the number of those that are rotated is rounded down.
    share = (shape.rotated + 0.5) / shape.row
    config = parse_config({**data, **one_key}, extras, rotated_share=share)
    return replace(config, latent_rank=shape.rank)


def sparse_layers(data: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has a mixture: each `moe_layer_freq`-th, but not the first few."""
    key, step = "first_k_dense_replace", count(data, "moe_layer_freq")
    first = count(data, key) if data[key] else 0
    layers = range(count(data, "num_hidden_layers"))
    return tuple(index >= first and index % step == 0 for index in layers)


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(layer_specs, config))


def layer_specs(config: ModelConfig, index: int) -> DeepseekLayerParams:
    """Description of the layer of an index."""
    extras, prefix = config.extras, f"model.layers.{index}"
    sparse = extras.sparse[index]
    mlp = f"{prefix}.mlp.shared_experts" if sparse else f"{prefix}.mlp"
    sized = replace(config, intermediate_size=extras.shared_size) if sparse else config
    axis = "shared_mlp" if sparse else "mlp"
    return DeepseekLayerParams(
        attention=latent_attention_specs(config, extras.attention, index),
        mlp_norm=norm(f"{prefix}.post_attention_layernorm", config.hidden_size),
        gate_up=gate_up_projection(mlp, sized, bias=False, axis=axis),
        down=down_projection(mlp, sized, bias=False, axis=axis),
        mixture=mixture_specs(f"{prefix}.mlp", config, extras.routing) if sparse else None,
        bias=None,
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: DeepseekLayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`; no layer has a window."""
    del window
    extras, act = config.extras, config.hidden_act
    x, pages = attend(
        params.attention, x, pages, angles, meta, config=config, shape=extras.attention
    )
    normed = rms_norm(x, params.mlp_norm, config.norm_eps)
    inner = params.gate_up.gated(normed, act)
    if params.mixture is None:
        return params.down.added_to(x, inner), pages
    mixed = mix(params.mixture, extras.routing, normed, meta, act, params.bias)
    return x + params.mixture.down.total(params.down.added_to(mixed, inner)), pages


forward = partial(decode, layer)
