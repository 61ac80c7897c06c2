"""Mistral: Llama's layers without biases, attending over a sliding window in its first release."""

from __future__ import annotations

from functools import partial
from typing import Any

from paged.models.config import ModelConfig
from paged.models.layers import DecoderParams, decoder_specs, layer_specs
from paged.models.llama import forward

__all__ = ["DEFAULTS", "forward", "specs"]

# A window in config.json applies to every layer; null means none.
DEFAULTS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4096}


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(layer_specs, config))
