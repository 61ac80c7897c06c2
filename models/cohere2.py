"""Cohere Command R7B and Command A: layers with a window rotate, those that see all do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from paged.attention import AttentionMetadata
from paged.cache import PagedKVCache
from paged.models import cohere
from paged.models.cohere import scaled_logits, specs
from paged.models.config import ModelConfig
from paged.models.config_values import expect
from paged.models.layers import DecoderParams, layer_norm, run_layers
from paged.models.rope import rotation

__all__ = ["DEFAULTS", "configure", "forward", "scaled_logits", "specs"]

DEFAULTS: dict[str, Any] = {
    **cohere.DEFAULTS,
    "rope_theta": 10000.0,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "use_qk_norm", False)
    return cohere.configure(data)


def forward(
    params: DecoderParams,
    config: ModelConfig,
    tokens: jax.Array,
    cache: PagedKVCache,
    meta: AttentionMetadata,
) -> tuple[jax.Array, PagedKVCache]:
    """See `paged.models.registry.Family`."""
    x = params.embedding.lookup(tokens)
    turned = rotation(config, meta.positions)
    angles = [turned if window else None for window in config.windows]
    x, cache = run_layers(cohere.layer, params, config, x, cache, meta, angles)
    return layer_norm(x, params.final_norm, None, config.norm_eps), cache
