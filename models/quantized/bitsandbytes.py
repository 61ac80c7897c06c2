"""Weights as bitsandbytes stores them: of 4 bits (NF4), or integers of 8 with a scale an output.

A byte holds two neighbours of the flattened weight, the first in its high half; 64 neighbours share
a scale. Scales may be quantised themselves: what reads the files expands those
(`paged.models.loading.bitsandbytes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged.errors import ConfigError
from paged.models.quantized.channels import INT8
from paged.models.quantized.coded import GroupCoded
from paged.models.quantized.groups import pack
from paged.models.quantized.making import made
from paged.models.quantized.rules import modules_of
from paged.models.quantized.stored import Int8Groups, Tensor, stored
from paged.models.weights import Dense, Linear

NF4_GROUP = 64
NF4_SCALES = "weight.scales"
"""What the names of expanded scales end in."""
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_BYTES = jnp.dtype(jnp.uint8)


@dataclass(frozen=True)
class Nf4Groups:
    """The scheme of NF4, and its layout."""

    def describe(self, weight: Dense) -> Linear:
        """See `Scheme`."""
        kernel: Any = weight.kernel
        (inputs, *outputs), (input_axis, *axes) = kernel.shape, kernel.axes
        if inputs % NF4_GROUP:
            raise ConfigError(
                f"NF4 weights have groups of {NF4_GROUP} inputs, and the {inputs} inputs of "
                f"{modules_of(weight)[0]!r} do not divide into such"
            )
        groups = inputs // NF4_GROUP
        scale_axes = (input_axis if groups > 1 else None, *axes)
        packed = (inputs // 2, *outputs)
        described = GroupCoded(
            made(self, kernel, "weight", packed, kernel.axes, _BYTES),
            made(self, kernel, "scale", (groups, *outputs), scale_axes, jnp.dtype(jnp.float32)),
            weight.bias,
            codes=_NF4,
        )
        return stored(described, self)

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        """See `Layout`."""
        many = outputs * inputs
        if field == "weight":
            return (Tensor("weight", (many // 2, 1), np.dtype(np.uint8), any_shape=True),)
        return (Tensor(NF4_SCALES, (many // NF4_GROUP,)),)

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        """See `Layout`."""
        [tensor] = tensors
        if field == "weight":
            tensor = jnp.stack([tensor >> 4, tensor & 15], axis=-1)
        return tensor.reshape(outputs, -1)

    def arrange(self, field: str, rows: jax.Array) -> jax.Array:
        """See `Layout`."""
        inputs_first = jnp.moveaxis(rows, -1, 0)
        return pack(inputs_first, 4, NF4_GROUP) if field == "weight" else inputs_first

    def __call__(self, kernel: jax.Array) -> Mapping[str, jax.Array]:
        """See `Quantizer`: of weights that are drawn at random."""
        groups = kernel.reshape(-1, NF4_GROUP, *kernel.shape[1:])
        scale = jnp.max(jnp.abs(groups), axis=1)
        # Codes rise: the nearest is where halves between neighbours are passed.
        halves = jnp.asarray([(one + other) / 2 for one, other in pairwise(_NF4)])
        values = jnp.searchsorted(halves, groups / scale[:, None]).astype(jnp.uint8)
        return {"weight": pack(values.reshape(kernel.shape), 4, NF4_GROUP), "scale": scale}


@dataclass(frozen=True)
class ScbChannels(Int8Groups):
    """Integers of 8 bits whose scales are the largest magnitudes of outputs (LLM.int8).

    Activations are not quantised.
    """

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        """See `Layout`."""
        return {
            "weight": (Tensor("weight", (outputs, inputs), INT8),),
            "scale": (Tensor("SCB", (outputs,)),),
        }[field]

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        """See `Layout`."""
        if field == "weight":
            return super().decode(field, outputs, *tensors)
        return tensors[0][:, None] / 127
