"""A model that makes one vector of each text: an encoder, or a decoder without its head.

An encoder with a classifier makes a score instead, of the two texts that it reads as one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from paged.attention import BACKENDS, attention_metadata
from paged.cache import PagedKVCache
from paged.models.config import ModelConfig
from paged.models.encoder import classify, encode, is_classifier
from paged.models.pooling import ACTIVATIONS, Pooling
from paged.models.registry import ENCODERS, Encoder, get_family
from paged.models.weights import Linear

_PAGE_SIZE = 16


@struct.dataclass
class EmbedderParams:
    """Weights of the model, and of the layers that its vectors pass through."""

    body: Any
    dense: tuple[Linear, ...]


@dataclass(frozen=True)
class Embedder:
    """What is computed; hashable, so that programs are compiled for it.

    Attributes:
        pooling: what becomes of hidden states, except in a model that scores.
        activation: what scores end in, one of `paged.models.pooling.ACTIVATIONS`.
        backend: of a decoder's attention (see `paged.attention.BACKENDS`).
    """

    config: ModelConfig
    pooling: Pooling
    activation: str = "Identity"
    backend: str = "xla"

    @property
    def scores(self) -> bool:
        """Whether it makes a score of two texts, not a vector of one."""
        return is_classifier(self.config)

    @property
    def prefix(self) -> str:
        """What the names of the body begin with where a checkpoint has more than the body."""
        return "model." if self._encoder is None else f"{self._encoder.prefix}."

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self.pooling.dense[-1].outputs if self.pooling.dense else self.config.hidden_size

    def specs(self) -> EmbedderParams:
        """Description of the parameters. Each dense layer has a checkpoint of its own."""
        dense = tuple(module.specs() for module in self.pooling.dense)
        if self._encoder is not None:
            return EmbedderParams(self._encoder.specs(self.config), dense)
        body = get_family(self.config.architecture).specs(self.config)
        return EmbedderParams(replace(body, head=None), dense)

    def __call__(
        self, params: EmbedderParams, tokens: jax.Array, types: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Vectors [R, N], or scores [R, 1], float32 of texts in a grid.

        Args:
            tokens: [R, L] int32, each row's text from its first place on.
            types: [R, L] int32, which text of a pair a token is of; only encoders tell them apart.
            lengths: [R] int32 tokens of each row, at least 1.
        """
        hidden = self._hidden(params, tokens, types, lengths)
        if self.scores:
            return ACTIVATIONS[self.activation](classify(params.body, hidden[:, 0]))
        return self.pooling(hidden, lengths, params.dense)

    @property
    def _encoder(self) -> Encoder | None:
        """What of its family is its own; None for a decoder."""
        return ENCODERS.get(self.config.architecture)

    def _hidden(
        self, params: EmbedderParams, tokens: jax.Array, types: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Hidden states [R, L, D]."""
        if self._encoder is not None:
            return encode(params.body, self.config, tokens, types, lengths)
        return self._decode(params, tokens)

    def _decode(self, params: EmbedderParams, tokens: jax.Array) -> jax.Array:
        """Hidden states of a decoder, over pages that live for this call alone.

        Padding is run as if it were text: no token attends to what comes behind it.
        """
        rows, length = tokens.shape
        pages = -(-length // _PAGE_SIZE)
        meta = attention_metadata(
            1 + jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages),
            jnp.arange(rows, dtype=jnp.int32),
            jnp.full(rows, length, jnp.int32),
            jnp.zeros(rows, jnp.int32),
            num_tokens=rows * length,
            page_size=_PAGE_SIZE,
            tile_size=BACKENDS[self.backend]().tile_size,
            decode_only=False,
            backend=self.backend,
        )
        family = get_family(self.config.architecture)
        dtype = params.body.embedding.dtype
        cache = PagedKVCache.zeros(self.config.cache_spec(1 + rows * pages, _PAGE_SIZE, dtype))
        hidden, _ = family.forward(params.body, self.config, tokens.reshape(-1), cache, meta)
        return hidden.reshape(rows, length, -1)
