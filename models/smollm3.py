"""SmolLM3: Llama's layers, of which every fourth rotates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from paged.attention import AttentionMetadata
from paged.cache import PagedKVCache
from paged.errors import ConfigError
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import count, shown
from paged.models.layers import DecoderParams, rms_norm, run_layers
from paged.models.llama import layer, specs
from paged.models.rope import rotation

__all__ = ["DEFAULTS", "configure", "forward", "specs"]

DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "no_rope_layer_interval": 4,
    "num_key_value_heads": 4,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Extras:
    """Settings of SmolLM3.

    Attributes:
        rotated: which layers rotate queries and keys.
    """

    rotated: tuple[bool, ...]


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """The configuration. If there are windows, layers that do not rotate have them by default."""
    rotated = _rotated(data)
    types = ["full_attention" if each else "sliding_attention" for each in rotated]
    return parse_config({**data, "layer_types": data.get("layer_types") or types}, Extras(rotated))


def _rotated(data: Mapping[str, Any]) -> tuple[bool, ...]:
    num_layers = count(data, "num_hidden_layers")
    given = data.get("no_rope_layers")  # despite its name, 1 is for layers that rotate
    if given is None:
        interval = count(data, "no_rope_layer_interval")
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if (
        not isinstance(given, list)
        or len(given) < num_layers
        or not all(e in (0, 1) for e in given)
    ):
        raise ConfigError(
            f"'no_rope_layers' must hold 0 or 1 for each of {num_layers} layers, found "
            f"{shown(given)}"
        )
    return tuple(map(bool, given[:num_layers]))


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
    angles = [turned if rotated else None for rotated in config.extras.rotated]
    x, cache = run_layers(layer, params, config, x, cache, meta, angles)
    return rms_norm(x, params.final_norm, config.norm_eps), cache
