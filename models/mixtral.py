"""Mixtral: Mistral's layers with a mixture of experts for each MLP."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from paged.attention import AttentionMetadata
from paged.cache import Pages
from paged.models import llama
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import count
from paged.models.experts import (
    Routing,
    SparseLayerParams,
    add_mixture,
    mixture_specs,
    sparse_layer_specs,
)
from paged.models.layers import DecoderParams, decode, decoder_specs, layer_specs
from paged.models.rope import Rotation

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "use_sliding_window": True,
    "sliding_window": None,
}


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`; the settings of its own are `Routing`."""
    routing = Routing(
        num_experts=count(data, "num_local_experts"),
        num_chosen=count(data, "num_experts_per_tok"),
        expert_size=count(data, "intermediate_size"),
        renormalise=True,
    )
    return parse_config(data, routing)


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config))


def _layer_specs(config: ModelConfig, index: int) -> SparseLayerParams:
    prefix = f"model.layers.{index}.block_sparse_moe"
    mixture = mixture_specs(prefix, config, config.extras, gate="w1", up="w3", down="w2")
    return sparse_layer_specs(layer_specs(config, index), mixture)


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: SparseLayerParams,
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
    return add_mixture(params, x, config.extras, meta, config, config.hidden_act), pages


forward = partial(decode, layer)
