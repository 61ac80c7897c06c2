"""DeepSeek-V3 and R1: V2 whose experts count by sigmoids, and are chosen with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from paged.models import deepseek_v2
from paged.models.config import ModelConfig
from paged.models.config_values import count, expect
from paged.models.deepseek_v2 import DeepseekLayerParams, forward
from paged.models.layers import DecoderParams, decoder_specs
from paged.models.weights import vector

__all__ = ["DEFAULTS", "configure", "forward", "specs"]

DEFAULTS: dict[str, Any] = deepseek_v2.DEFAULTS | {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "topk_method": "noaux_tc",
}


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "scoring_func", "sigmoid")
    expect(data, "topk_method", "noaux_tc")
    groups = count(data, "n_group"), count(data, "topk_group")
    routing = deepseek_v2.routing(data, groups, best=2, sigmoid=True)
    return deepseek_v2.latent_config(data, routing)


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config))


def _layer_specs(config: ModelConfig, index: int) -> DeepseekLayerParams:
    plain = deepseek_v2.layer_specs(config, index)
    if plain.mixture is None:
        return plain
    name = f"model.layers.{index}.mlp.gate.e_score_correction_bias"
    bias: Any = vector(name, config.extras.routing.num_experts, "zeros")
    # In 16 bits it would change who is chosen.
    return replace(plain, bias=replace(bias, dtype=jnp.dtype(jnp.float32)))
