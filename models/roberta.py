"""RoBERTa and XLM-RoBERTa: BERT whose positions begin behind that of padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged.models import bert
from paged.models.config import ModelConfig, token_ids
from paged.models.encoder import EncoderParams, configure_encoder, encoder_specs

PREFIX = "roberta"
DEFAULTS: dict[str, Any] = {**bert.DEFAULTS, "pad_token_id": 1}


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Encoder`. A table of 514 positions is for 512 tokens."""
    padding = max(token_ids(data["pad_token_id"]), default=1)
    return configure_encoder(data, first_position=padding + 1)


def specs(config: ModelConfig) -> EncoderParams:
    """Description of the parameters."""
    return encoder_specs(config, PREFIX, ("classifier.dense", "classifier.out_proj"))
