"""Qwen2 and Qwen2.5: Llama's layers with biases on queries, keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any

from paged.models.config import ModelConfig
from paged.models.layers import DecoderParams, decoder_specs, layer_specs
from paged.models.llama import forward

__all__ = ["DEFAULTS", "forward", "specs"]

# The window is off unless use_sliding_window is set, and then for the last layers only.
DEFAULTS: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(layer_specs, config, qkv_bias=True))
