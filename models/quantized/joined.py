"""Projections that are multiplied as one, and stored in different ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from paged.models.weights import Dense, Linear, ParamSpec, Unfused


@struct.dataclass
class Joined(Unfused):
    """Weights of the same inputs, whose outputs follow each other.

    Attributes:
        weights: one or more.
        axis: of their outputs [T, *N], along which they are joined (static).
    """

    weights: tuple[Linear, ...]
    axis: int = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        return jnp.concatenate([weight(x, dtype) for weight in self.weights], self.axis)


def split(weight: Dense, kinds: Sequence[Any]) -> list[tuple[Any, Dense]]:
    """Neighbouring parts of one kind, of a description of a fused projection, each as its own.

    Args:
        kinds: of each part.
    """
    kernel: Any = weight.kernel
    runs = [
        (kind, [index for index, _ in run])
        for kind, run in groupby(enumerate(kinds), key=lambda pair: pair[1])
    ]
    if len(runs) == 1:
        return [(runs[0][0], weight)]
    return [(kind, Dense(_some(kernel, run), _some(weight.bias, run))) for kind, run in runs]


def _some(spec: Any, indices: Iterable[int]) -> Any:
    """The parameter of some parts alone; None stays."""
    if spec is None:
        return None
    assert isinstance(spec, ParamSpec)
    parts = tuple(spec.parts[index] for index in indices)
    # Of a kernel, a view has the inputs last, and the parameter has them first.
    outputs = list(spec.shape[1:] if spec.transpose else spec.shape)
    outputs[spec.join_axis] = sum(part.view[spec.join_axis] for part in parts)
    shape = (spec.shape[0], *outputs) if spec.transpose else tuple(outputs)
    return replace(spec, parts=parts, shape=shape)
