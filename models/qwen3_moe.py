"""Qwen3-MoE: Qwen3 with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import struct

from paged.attention import AttentionMetadata
from paged.cache import Pages
from paged.models import qwen3
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import expect
from paged.models.experts import (
    Routing,
    SparseLayerParams,
    add_mixture,
    mixture_specs,
    sparse_layer_specs,
)
from paged.models.layers import DecoderParams, add_mlp, decode, decoder_specs
from paged.models.qwen2_moe import routing, sparse_layers
from paged.models.qwen3 import Qwen3AttentionParams, Qwen3LayerParams
from paged.models.rope import Rotation

DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Extras:
    """Settings of Qwen3-MoE.

    Attributes:
        routing: of the mixtures.
        sparse: whether each layer has a mixture, rather than an MLP.
    """

    routing: Routing
    sparse: tuple[bool, ...]


@struct.dataclass
class Qwen3MoeLayerParams(SparseLayerParams, Qwen3AttentionParams):
    """Weights of a layer with a mixture."""


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "use_sliding_window", False)
    return parse_config(data, Extras(routing(data), sparse_layers(data)))


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config))


def _layer_specs(config: ModelConfig, index: int) -> Qwen3LayerParams | Qwen3MoeLayerParams:
    plain = qwen3.layer_specs(config, index)
    if not config.extras.sparse[index]:
        return plain
    mixture = mixture_specs(f"model.layers.{index}.mlp", config, config.extras.routing)
    return Qwen3MoeLayerParams(
        **vars(sparse_layer_specs(plain, mixture)), q_norm=plain.q_norm, k_norm=plain.k_norm
    )


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: Qwen3LayerParams | Qwen3MoeLayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`."""
    x, pages = qwen3.attend(params, x, pages, angles, meta, config=config, window=window)
    if isinstance(params, Qwen3LayerParams):
        return add_mlp(params, x, config), pages
    return add_mixture(params, x, config.extras.routing, meta, config, config.hidden_act), pages


forward = partial(decode, layer)
