"""BERT: positions from 0, and a classifier behind the layer that BERT pools its first token by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged.models.config import ModelConfig
from paged.models.encoder import EncoderParams, configure_encoder, encoder_specs

PREFIX = "bert"
DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Encoder`."""
    return configure_encoder(data)


def specs(config: ModelConfig) -> EncoderParams:
    """Description of the parameters."""
    return encoder_specs(config, PREFIX, (f"{PREFIX}.pooler.dense", "classifier"))
