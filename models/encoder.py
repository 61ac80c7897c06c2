"""The parts of encoders: post-norm layers in which every token attends to all of its text.

Texts are padded to a grid: R rows of L places, of which each row's first `lengths[r]` hold tokens.
No token attends to padding, and nothing is kept from one call to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from paged.errors import ConfigError
from paged.models.activations import activate
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import count, expect, shown
from paged.models.layers import LayerNorm, biased_norm
from paged.models.weights import Dense, Embedding, Linear, embedding, fused_linear, linear

# Scores (float32) that attention holds at once: 1 GiB of them. More are made in several turns.
_MOST_SCORES = 2**28


@dataclass(frozen=True)
class EncoderSettings:
    """What only encoders have in config.json.

    Attributes:
        num_types: kinds of tokens, such as those of the first and of the second text of a pair.
        first_position: row of the table of positions that a text's first token takes.
        num_labels: numbers that a classifier gives.
    """

    num_types: int
    first_position: int
    num_labels: int


@struct.dataclass
class EncoderLayerParams:
    """Weights of one post-norm layer.

    Attributes:
        qkv: D to [3, H, E].
        out: H * E to D.
        up: D to F.
        down: F to D.
    """

    qkv: Linear
    out: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    mlp_norm: LayerNorm


@struct.dataclass
class ClassifierParams:
    """Weights of what makes numbers of a text's first token.

    Attributes:
        dense: D to D.
        out: D to the labels.
    """

    dense: Linear
    out: Linear


@struct.dataclass
class EncoderParams:
    """Weights of an encoder.

    Attributes:
        words, positions, types: what a token's vector is the sum of.
        classifier: None in models that give vectors.
    """

    words: Embedding
    positions: Embedding
    types: Embedding
    norm: LayerNorm
    layers: tuple[EncoderLayerParams, ...]
    classifier: ClassifierParams | None


def configure_encoder(data: Mapping[str, Any], first_position: int = 0) -> ModelConfig:
    """The configuration of an encoder; its rows of positions before `first_position` are unused.

    Raises:
        ConfigError: it is of a kind that is not run.
    """
    expect(data, "position_embedding_type", "absolute")
    expect(data, "is_decoder", False)
    longest = count(data, "max_position_embeddings") - first_position
    settings = EncoderSettings(count(data, "type_vocab_size"), first_position, _num_labels(data))
    eps = {"rms_norm_eps": data["layer_norm_eps"]}
    return parse_config({**data, **eps, "max_position_embeddings": longest}, settings)


def _num_labels(data: Mapping[str, Any]) -> int:
    """How many labels `id2label` names; two where a file is silent, as for transformers."""
    labels = data.get("id2label")
    if labels is None:
        return count(data, "num_labels", 2)
    if not isinstance(labels, dict) or not labels:
        raise ConfigError(f"'id2label' must name the labels, found {shown(labels)}")
    return len(labels)


def is_classifier(config: ModelConfig) -> bool:
    """Whether a model scores a text."""
    return config.architecture.endswith("ForSequenceClassification")


def encoder_specs(config: ModelConfig, prefix: str, classifier: tuple[str, str]) -> EncoderParams:
    """Description of an encoder.

    Args:
        prefix: what the names of its body begin with.
        classifier: names of the two weights that a classifier has besides.
    """
    size, settings, names = config.hidden_size, config.extras, f"{prefix}.embeddings"
    rows = settings.first_position + config.max_position_embeddings
    scores = is_classifier(config)
    return EncoderParams(
        words=embedding(f"{names}.word_embeddings.weight", config.vocab_size, size),
        positions=embedding(f"{names}.position_embeddings.weight", rows, size),
        types=embedding(f"{names}.token_type_embeddings.weight", settings.num_types, size),
        norm=biased_norm(f"{names}.LayerNorm", size),
        layers=tuple(
            _layer_specs(config, f"{prefix}.encoder.layer.{index}")
            for index in range(config.num_layers)
        ),
        classifier=_classifier_specs(config, *classifier) if scores else None,
    )


def _layer_specs(config: ModelConfig, prefix: str) -> EncoderLayerParams:
    size, inner = config.hidden_size, config.intermediate_size
    attention = f"{prefix}.attention"
    return EncoderLayerParams(
        qkv=_qkv_specs(config, f"{attention}.self"),
        out=linear(f"{attention}.output.dense", size, size, bias=True, axes=("heads", None)),
        attention_norm=biased_norm(f"{attention}.output.LayerNorm", size),
        up=linear(f"{prefix}.intermediate.dense", size, inner, bias=True, axes=(None, "mlp")),
        down=linear(f"{prefix}.output.dense", inner, size, bias=True, axes=("mlp", None)),
        mlp_norm=biased_norm(f"{prefix}.output.LayerNorm", size),
    )


def _qkv_specs(config: ModelConfig, prefix: str) -> Dense:
    view = (1, config.num_heads, config.head_dim)
    parts = {f"{prefix}.{name}": view for name in ("query", "key", "value")}
    axes = (None, None, "heads", None)
    return fused_linear(parts, config.hidden_size, bias=True, join_axis=0, axes=axes)


def _classifier_specs(config: ModelConfig, dense: str, out: str) -> ClassifierParams:
    size = config.hidden_size
    return ClassifierParams(
        dense=linear(dense, size, size, bias=True),
        out=linear(out, size, config.extras.num_labels, bias=True),
    )


def encode(
    params: EncoderParams,
    config: ModelConfig,
    tokens: jax.Array,
    types: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """Hidden states [R, L, D] of tokens [R, L] int32 of `types` [R, L] int32.

    `lengths` [R] int32 are at least 1; states of places beyond them mean nothing.
    """
    rows, length = tokens.shape
    positions = config.extras.first_position + jnp.arange(length, dtype=jnp.int32)
    x = params.words.lookup(tokens) + params.types.lookup(types)
    x = params.norm(x + params.positions.lookup(positions), config.norm_eps)
    x = x.reshape(rows * length, -1)
    for weights in params.layers:
        x = layer(weights, x, lengths, config=config)
    return x.reshape(rows, length, -1)


@partial(jax.jit, static_argnames=("config",))
def layer(
    params: EncoderLayerParams, x: jax.Array, lengths: jax.Array, *, config: ModelConfig
) -> jax.Array:
    """One layer: x [R * L, D] in and out."""
    qkv = params.qkv(x).reshape(lengths.shape[0], -1, 3, config.num_heads, config.head_dim)
    attended = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], lengths)
    x = params.out.added_to(x, attended.reshape(x.shape[0], -1))
    x = params.attention_norm(x, config.norm_eps)
    inner = activate(params.up(x), config.hidden_act)
    return params.mlp_norm(params.down.added_to(x, inner), config.norm_eps)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attention of all places [R, L, H, E] to the first `lengths` [R] of their row."""
    rows, length, heads, size = q.shape
    turns = 1
    while rows * heads * length**2 > turns * _MOST_SCORES and length % (2 * turns) == 0:
        turns *= 2

    def turn(queries: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(queries, k, v, key_value_seq_lengths=lengths)

    if turns == 1:
        return turn(q)
    parts = jnp.moveaxis(q.reshape(rows, turns, length // turns, heads, size), 1, 0)
    return jnp.moveaxis(jax.lax.map(turn, parts), 0, 1).reshape(q.shape)


def classify(params: EncoderParams, first: jax.Array) -> jax.Array:
    """Numbers [R, labels] float32 that a classifier makes of first tokens [R, D]."""
    assert params.classifier is not None, "only classifiers score"
    inner = jnp.tanh(params.classifier.dense(first).astype(jnp.float32)).astype(first.dtype)
    return params.classifier.out(inner, jnp.dtype(jnp.float32))
