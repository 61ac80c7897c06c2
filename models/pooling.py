"""From a text's hidden states to one vector: what sentence-transformers calls its modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from paged.models.weights import Linear, linear

Kind = Literal["cls", "last", "max", "mean"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "Identity": lambda x: x,
    "Sigmoid": jax.nn.sigmoid,
    "Tanh": jnp.tanh,
}
"""Functions of torch.nn that vectors and scores may end in."""


@dataclass(frozen=True)
class DenseModule:
    """A layer that vectors pass through.

    Attributes:
        folder: beside the model's weights, where its own are.
        activation: one of `ACTIVATIONS`.
    """

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str

    def specs(self) -> Any:
        """Description of the parameters, under their names in the module's own checkpoint."""
        return linear("linear", self.inputs, self.outputs, bias=self.bias)


@dataclass(frozen=True)
class Pooling:
    """What becomes of hidden states.

    Attributes:
        kind: which of a text's tokens count: its first, its last, or all.
        dense: layers behind it.
        normalize: make the vector's length 1.
    """

    kind: Kind
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = True

    def __call__(
        self, hidden: jax.Array, lengths: jax.Array, weights: tuple[Linear, ...]
    ) -> jax.Array:
        """Vectors [R, N] float32 of hidden states [R, L, D], of which `lengths` [R] count."""
        vectors = pool(hidden, lengths, self.kind)
        for module, weight in zip(self.dense, weights, strict=True):
            vectors = ACTIVATIONS[module.activation](weight(vectors.astype(hidden.dtype)))
        vectors = vectors.astype(jnp.float32)
        return normalized(vectors) if self.normalize else vectors


def pool(hidden: jax.Array, lengths: jax.Array, kind: Kind) -> jax.Array:
    """[R, L, D] to [R, D] float32, over the first `lengths` [R] places, at least 1, of a row."""
    wide = hidden.astype(jnp.float32)
    if kind == "cls":
        return wide[:, 0]
    if kind == "last":
        return jnp.take_along_axis(wide, (lengths - 1)[:, None, None], axis=1)[:, 0]
    counts = (jnp.arange(hidden.shape[1]) < lengths[:, None])[..., None]
    if kind == "max":
        return jnp.max(jnp.where(counts, wide, -jnp.inf), axis=1)
    return jnp.sum(jnp.where(counts, wide, 0), axis=1) / lengths[:, None]


def normalized(vectors: jax.Array) -> jax.Array:
    """[R, N] divided by their lengths; nothing becomes of a vector of zeros."""
    norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(norms, 1e-12)
