"""Quantised weights made of weights in full precision, as these are loaded or drawn at random."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from paged.errors import ConfigError
from paged.models.quantized.channels import (
    FLOAT8,
    INT8,
    TILE,
    ChannelScaled,
    TileScaled,
    scaled,
)
from paged.models.quantized.groups import GroupScaled, pack
from paged.models.quantized.rules import Quantization, Rule, Scheme, from_glob, modules_of
from paged.models.weights import Dense, Linear, ParamSpec

_GROUP, _SMALLEST_GROUP = 128, 32
_F32, _BYTES = jnp.dtype(jnp.float32), jnp.dtype(jnp.uint8)
# How much of the range of a group its scale may give up for its other values, in the search for
# the least squared error.
_SHARES = tuple(1 - step / 20 for step in range(9))


class Quantizer(Protocol):
    """Makes the arrays of a quantised weight, by their names in its type."""

    def __call__(self, kernel: jax.Array) -> Mapping[str, jax.Array]:
        """Of a kernel [K, *N] float32."""
        ...


@dataclass(frozen=True, kw_only=True)
class MadeSpec(ParamSpec):
    """An array of a weight that is quantised as it is loaded.

    Attributes:
        of: the kernel in full precision.
        quantizer: makes it.
        field: which of the arrays that the quantizer makes.
    """

    of: ParamSpec
    quantizer: Quantizer
    field: str

    def bytes_to_make(self, dtype: jnp.dtype) -> int:
        """See `ParamSpec.bytes_to_make`."""
        return math.prod(self.of.shape) * _F32.itemsize

    def anonymous(self) -> Self:
        """See `ParamSpec.anonymous`."""
        return replace(super().anonymous(), of=self.of.anonymous())

    def stored(self, name: str) -> ParamSpec:
        """See `ParamSpec.stored`: files hold the kernel."""
        of = self.of.stored(f"{name.removesuffix(self.field)}kernel")
        return replace(self, parts=of.parts, of=of)

    def random(self, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.random`."""
        return self.quantizer(self.of.random(key, _F32))[self.field].astype(dtype)

    def spread(self, sharding: Any) -> tuple[Any, ...]:
        """See `ParamSpec.spread`: each device gets the share of the kernel that is its."""
        if isinstance(sharding, NamedSharding):
            sharding = self.of.sharding_on(sharding.mesh)
        return self.of.spread(sharding)

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`."""
        return self.quantizer(self.of.assemble(tensors, _F32))[self.field].astype(dtype)


def made(
    quantizer: Quantizer,
    kernel: ParamSpec,
    field: str,
    shape: Sequence[int],
    axes: Sequence[str | None],
    dtype: jnp.dtype | None,
) -> Any:
    """Description of one array that `quantizer` makes of a kernel."""
    return MadeSpec(
        parts=kernel.parts,
        shape=tuple(shape),
        axes=tuple(axes),
        init=kernel.init,
        dtype=dtype,
        of=kernel,
        quantizer=quantizer,
        field=field,
    )


@dataclass(frozen=True)
class ToChannels:
    """Makes a `ChannelScaled`, and is the scheme of it.

    Attributes:
        dtype: of the weight.
    """

    dtype: jnp.dtype

    def __call__(self, kernel: jax.Array) -> Mapping[str, jax.Array]:
        weight, scale = scaled(jnp.moveaxis(kernel, 0, -1), self.dtype)
        return {"weight": weight, "scale": scale}

    def describe(self, weight: Dense) -> Linear:
        """See `Scheme`."""
        kernel: Any = weight.kernel
        (inputs, *outputs), (input_axis, *axes) = kernel.shape, kernel.axes
        return ChannelScaled(
            weight=made(
                self, kernel, "weight", (*outputs, inputs), (*axes, input_axis), self.dtype
            ),
            scale=made(self, kernel, "scale", outputs, axes, _F32),
            bias=weight.bias,
        )


@dataclass(frozen=True)
class ToTiles:
    """Makes a `TileScaled`, and is the scheme of it."""

    def __call__(self, kernel: jax.Array) -> Mapping[str, jax.Array]:
        rows = jnp.moveaxis(kernel, 0, -1)
        inputs = rows.shape[-1]
        tiles = -(-inputs // TILE)
        padding = [(0, 0)] * (rows.ndim - 1) + [(0, tiles * TILE - inputs)]
        padded = jnp.pad(rows, padding).reshape(*rows.shape[:-1], tiles, TILE)
        weight, scale = scaled(padded, FLOAT8)
        return {"weight": weight.reshape(*rows.shape[:-1], -1)[..., :inputs], "scale": scale}

    def describe(self, weight: Dense) -> Linear:
        """See `Scheme`."""
        kernel: Any = weight.kernel
        (inputs, *outputs), (input_axis, *axes) = kernel.shape, kernel.axes
        tiles = -(-inputs // TILE)
        scale_axes = (*axes, input_axis if tiles > 1 else None)
        return TileScaled(
            weight=made(self, kernel, "weight", (*outputs, inputs), (*axes, input_axis), FLOAT8),
            scale=made(self, kernel, "scale", (*outputs, tiles), scale_axes, _F32),
            bias=weight.bias,
        )


@dataclass(frozen=True)
class ToGroups:
    """Makes a `GroupScaled` of values around the middle one.

    Attributes:
        bits: of a value.
        group: inputs that share a scale.
    """

    bits: int
    group: int

    def __call__(self, kernel: jax.Array) -> Mapping[str, jax.Array]:
        groups = kernel.reshape(-1, self.group, *kernel.shape[1:])
        scale = self._scale(groups)
        values = (self._rounded(groups, scale) + 2 ** (self.bits - 1)).astype(jnp.uint8)
        packed = pack(values.reshape(kernel.shape), self.bits, self.group)
        zero = jnp.full(scale.shape, 2 ** (self.bits - 1), jnp.uint8)
        order = jnp.arange(len(kernel), dtype=jnp.int32)
        return {"weight": packed, "scale": scale, "zero": zero, "order": order}

    def describe(self, weight: Dense, *fields: str) -> Linear:
        """See `Scheme`; with these of its arrays, or with the two that it needs."""
        kernel: Any = weight.kernel
        (inputs, *outputs), (input_axis, *axes) = kernel.shape, kernel.axes
        groups = inputs // self.group
        per_group = ((groups, *outputs), (input_axis if groups > 1 else None, *axes))
        packed = ((inputs * self.bits // 8, *outputs), kernel.axes)
        kinds: dict[str, tuple[Any, Any, jnp.dtype | None]] = {
            "weight": (*packed, _BYTES),
            "scale": (*per_group, None),
            "zero": (*per_group, _BYTES),
            "order": ((inputs,), (input_axis,), jnp.dtype(jnp.int32)),
        }
        arrays: dict[str, Any] = {
            field: made(self, kernel, field, *kinds[field])
            for field in fields or ("weight", "scale")
        }
        return GroupScaled(**arrays, bias=weight.bias, bits=self.bits)

    def _scale(self, groups: jax.Array) -> jax.Array:
        """[K / group, *N]: of a few, that of the least squared error.

        The value of largest magnitude goes to the end that has one value more.
        """
        lowest, highest = jnp.min(groups, axis=1), jnp.max(groups, axis=1)
        extreme = jnp.where(-lowest > highest, lowest, highest)
        whole = jnp.where(extreme == 0, 1, extreme / -(2.0 ** (self.bits - 1)))

        def better(so_far: tuple[jax.Array, jax.Array], share: jax.Array) -> Any:
            best, least = so_far
            scale = whole * share
            error = self._rounded(groups, scale) * scale[:, None] - groups
            loss = jnp.sum(error * error, axis=1)
            return (jnp.where(loss < least, scale, best), jnp.minimum(loss, least)), None

        start = whole, jnp.full_like(whole, jnp.inf)
        (best, _), _ = jax.lax.scan(better, start, jnp.asarray(_SHARES))
        return best

    def _rounded(self, groups: jax.Array, scale: jax.Array) -> jax.Array:
        half = 2 ** (self.bits - 1)
        return jnp.clip(jnp.round(groups / scale[:, None]), -half, half - 1)


@dataclass(frozen=True)
class Int4OnLoad:
    """The scheme of `ToGroups` with 4 bits, in groups of 128 inputs or the most that divide."""

    def describe(self, weight: Dense) -> Linear:
        """See `Scheme`."""
        kernel: Any = weight.kernel
        group = math.gcd(kernel.shape[0], _GROUP)
        if group < _SMALLEST_GROUP:
            raise ConfigError(
                f"int4 weights have groups of at least {_SMALLEST_GROUP} inputs, and the "
                f"{kernel.shape[0]} inputs of {modules_of(weight)[0]!r} do not divide into such; "
                "exclude it, or take fp8 or int8"
            )
        return ToGroups(4, group).describe(weight)


METHODS: dict[str, Scheme] = {
    "fp8": ToChannels(FLOAT8),
    "int8": ToChannels(INT8),
    "int4": Int4OnLoad(),
}


def made_on_load(name: str, exclude: Iterable[str] = ()) -> Quantization:
    """The quantisation of all projections but the excluded.

    Args:
        name: one of `METHODS`.
        exclude: patterns as of files, for names of modules in the checkpoint.
    """
    return Quantization(
        name=name,
        rules=(Rule(METHODS[name], (".*",)),),
        excluded=tuple(map(from_glob, exclude)),
        made_on_load=True,
    )
