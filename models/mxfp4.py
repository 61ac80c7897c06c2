"""Experts as gpt-oss stores them: weights of 4 bits in groups that share a scale (MXFP4).

A byte of the checkpoint holds two neighbours along a row, the first in its low half; 32 neighbours
share a scale, the exponent of 2 plus 127.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from paged.errors import ConfigError
from paged.models.quantized import E2M1, GroupCoded
from paged.models.quantized.groups import pack
from paged.models.weights import ParamSpec, Part

GROUP = 32
_BYTES = np.dtype(np.uint8)
# Of random scales: the least exponents that a scale of the usual weights has.
_RANDOM_EXPONENT = 127 - 7


@dataclass(frozen=True)
class Mxfp4Spec(ParamSpec):
    """The values or the scales of experts, [X, K / 2 or K / 32, *N], of one tensor."""

    def spread(self, sharding: Any) -> tuple[Any, ...]:
        """See `ParamSpec.spread`: of experts, each device gets those it needs, and all of them."""
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
        return (sharding,) * len(self.parts)

    def random(self, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.random`: any values, whose scales are all the same."""
        if self.is_scale:
            return jnp.full(self.shape, _RANDOM_EXPONENT, dtype)
        return jax.random.bits(key, self.shape, jnp.uint8)

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`: with the inputs before the outputs, and packed as ours are."""
        [tensor] = tensors
        if not self.is_scale:
            halves = jnp.stack([tensor & 15, tensor >> 4], axis=-1)
            tensor = halves.reshape(*tensor.shape[:2], -1)
        experts, _, *outputs = self.shape
        pairs = tensor.reshape(experts, *reversed(outputs), -1)
        kernels = pairs.transpose(0, *reversed(range(1, pairs.ndim)))
        return kernels if self.is_scale else jax.vmap(lambda each: pack(each, 4, GROUP))(kernels)

    @property
    def is_scale(self) -> bool:
        """Of a group, and not of a value."""
        return len(self.parts[0].shape) == 3


def mxfp4(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> GroupCoded:
    """Description of the weights of experts, [X, K, *N], stored as `name`_blocks and `name`_scales.

    Where there are two axes of outputs, their rows lie in the checkpoint with the first the faster.

    Raises:
        ConfigError: rows do not divide into groups.
    """
    experts, inputs, *outputs = shape
    if inputs % GROUP:
        raise ConfigError(f"MXFP4 weights have rows of groups of {GROUP}, found rows of {inputs}")
    rows = outputs[0] if len(outputs) == 1 else outputs[0] * outputs[1]
    groups = (experts, rows, inputs // GROUP)

    def spec(suffix: str, stored: tuple[int, ...], many: int) -> Any:
        part = Part(f"{name}_{suffix}", stored, stored, dtype=_BYTES)
        return Mxfp4Spec(
            (part,), (experts, many, *outputs), axes, "normal", dtype=jnp.dtype(jnp.uint8)
        )

    values = spec("blocks", (*groups, GROUP // 2), inputs // 2)
    return GroupCoded(values, spec("scales", groups, inputs // GROUP), codes=E2M1)
