"""A model cut into stages: some of its layers after others, each on devices of its own.

A stage has the weights and the pages of its own layers alone. The first one looks the tokens up,
the last one makes the logits, and between them hidden states go on as they are: a family runs the
layers that are here (`paged.models.layers.run_layers`), and does not know that there are others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct

from paged.errors import ConfigError
from paged.groups import LayerGroup
from paged.models.layers import DecoderParams
from paged.models.weights import Embedding


@dataclass(frozen=True)
class Stage:
    """Some layers of a model.

    Attributes:
        index: among `number` stages.
        first, end: the first of its layers, and the one behind its last.
        hidden_size, dtype: of the hidden states that go from stage to stage.
    """

    index: int
    number: int
    first: int
    end: int
    hidden_size: int
    dtype: jnp.dtype

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.number - 1

    def own(self, groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
        """The same groups, with the layers that are here alone."""
        return tuple(
            replace(group, layers=tuple(x for x in group.layers if self.first <= x < self.end))
            for group in groups
        )


@struct.dataclass
class NoEmbedding:
    """Stands where a stage needs no embedding: hidden states come from the stage before it."""

    def lookup(self, tokens: jax.Array) -> jax.Array:
        """Something in their place, which nobody reads."""
        return jnp.zeros((*tokens.shape, 1))


def divide(num_layers: int, number: int, hidden_size: int, dtype: jnp.dtype) -> tuple[Stage, ...]:
    """The stages of a model; the first ones have a layer more where there is a rest.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if number > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {number} is more than the {num_layers} layers of this model"
        )
    each, rest = divmod(num_layers, number)
    starts = [index * each + min(index, rest) for index in range(number + 1)]
    return tuple(
        Stage(index, number, starts[index], starts[index + 1], hidden_size, dtype)
        for index in range(number)
    )


def of_stage(decoder: DecoderParams, stage: Stage | None) -> DecoderParams:
    """What a stage has of a decoder's description or shapes; None for a model in one piece."""
    if stage is None:
        return decoder
    has_embedding = stage.is_first or (stage.is_last and decoder.head is None)
    nothing: Embedding = NoEmbedding()  # type: ignore[assignment]
    return replace(
        decoder,
        embedding=decoder.embedding if has_embedding else nothing,
        layers=decoder.layers[stage.first : stage.end],
        head=decoder.head if stage.is_last else None,
    )
