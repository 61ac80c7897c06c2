"""Weights of 4 bits in groups that share a scale (MXFP4), expanded when they are loaded.

A value is one of 16 (E2M1: a sign, two bits of exponent, one of mantissa); 32 neighbours along a
row share the power of two that they are multiplied by. A byte holds two values, the first in its
low half; a scale is the exponent plus 127.
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
from paged.models.weights import ParamSpec, Part

GROUP = 32
_BIAS = 127
_BYTES = np.dtype(np.uint8)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def expanded(blocks: jax.Array, scales: jax.Array) -> jax.Array:
    """[..., K / 32, 16] uint8 and [..., K / 32] uint8 to [..., K] float32."""
    values = jnp.asarray([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], jnp.float32)
    halves = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
    scaled = jnp.ldexp(
        values[halves].reshape(*scales.shape, GROUP), scales.astype(jnp.int32)[..., None] - _BIAS
    )
    return scaled.reshape(*scales.shape[:-1], -1)


@dataclass(frozen=True)
class Mxfp4Spec(ParamSpec):
    """A parameter of which the checkpoint has `parts` blocks [X, N, K / 32, 16] and scales."""

    def spread(self, sharding: Any) -> tuple[Any, ...]:
        """See `ParamSpec.spread`: of experts, each device gets those it needs, and all of them."""
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
        return (sharding,) * len(self.parts)

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`: expanded, with the inputs before the outputs."""
        blocks, scales = tensors
        experts, inputs, *outputs = self.shape
        rows = expanded(blocks, scales).astype(dtype)
        pairs = rows.reshape(experts, *reversed(outputs), inputs)
        return pairs.transpose(0, *reversed(range(1, pairs.ndim)))


def mxfp4(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
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
    parts = (
        Part(f"{name}_blocks", (*groups, GROUP // 2), (*groups, GROUP // 2), dtype=_BYTES),
        Part(f"{name}_scales", groups, groups, dtype=_BYTES),
    )
    return Mxfp4Spec(parts, shape, axes, "normal")
