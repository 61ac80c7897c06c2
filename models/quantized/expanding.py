"""Quantised weights as they would be in full precision, for what cannot multiply by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from paged.models.quantized.channels import ChannelScaled, TileScaled
from paged.models.quantized.coded import GroupCoded
from paged.models.quantized.groups import GroupScaled
from paged.models.quantized.rules import Scheme
from paged.models.quantized.shifted import GroupShifted
from paged.models.weights import Dense, ParamSpec, Part

QUANTIZED = ChannelScaled | TileScaled | GroupScaled | GroupShifted | GroupCoded
_F32 = jnp.dtype(jnp.float32)


def plain_kernel(weight: Any, dtype: jnp.dtype) -> jax.Array:
    """A quantised weight as the kernel [K, *N] of a plain one, inputs as they come."""
    if isinstance(weight, ChannelScaled):
        rows = weight.weight.astype(_F32) * weight.scale[..., None]
        return jnp.moveaxis(rows.astype(dtype), -1, 0)
    if isinstance(weight, TileScaled):
        return jnp.moveaxis(weight.expanded(dtype), -1, 0)
    if isinstance(weight, GroupScaled) and weight.order is not None:
        return jnp.take(weight.expanded(dtype), jnp.argsort(weight.order), axis=0)
    assert isinstance(weight, GroupScaled | GroupShifted | GroupCoded)
    return weight.expanded(dtype)


@dataclass(frozen=True, kw_only=True)
class ExpandedSpec(ParamSpec):
    """A parameter in full precision of a matrix that the checkpoint has quantised.

    Attributes:
        of: the parameter, of one tensor in full precision.
        stored: description of that tensor as a projection that is quantised.
    """

    of: ParamSpec
    stored_as: Any

    def anonymous(self) -> Self:
        """See `ParamSpec.anonymous`."""
        nameless = jax.tree.map(lambda spec: spec.anonymous(), self.stored_as)
        return replace(super().anonymous(), of=self.of.anonymous(), stored_as=nameless)

    def spread(self, sharding: Any) -> tuple[Any, ...]:
        """See `ParamSpec.spread`."""
        specs = jax.tree.leaves(self.stored_as)
        return tuple(place for spec in specs for place in spec.spread(sharding))

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`."""
        given = iter(tensors)
        weight = jax.tree.map(
            lambda spec: spec.assemble([next(given) for _ in spec.parts], spec.dtype_among(_F32)),
            self.stored_as,
        )
        return self.of.assemble([plain_kernel(weight, _F32).T], dtype)


def expanded_on_load(spec: ParamSpec, scheme: Scheme) -> ExpandedSpec | None:
    """The parameter of a matrix that a checkpoint has quantised; None if it has other parts, too.

    Raises:
        ConfigError: its shape does not go with the scheme.
    """
    [part, *others] = spec.parts
    if others or part.first_row or len(part.shape) != 2:
        return None
    outputs, inputs = part.shape
    whole = ParamSpec(
        (Part(part.name, part.shape, part.shape),),
        (inputs, outputs),
        (None, None),
        spec.init,
        transpose=True,
    )
    described = scheme.describe(Dense(whole))  # type: ignore[arg-type]
    parts = tuple(part for each in jax.tree.leaves(described) for part in each.parts)
    return ExpandedSpec(
        parts, spec.shape, spec.axes, spec.init, dtype=spec.dtype, of=spec, stored_as=described
    )
