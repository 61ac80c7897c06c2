"""Quantised weights as published checkpoints store them, and their way into the types here.

A scheme says which tensors of a module each array of a weight is made of, and how these decode to
rows [N, C]: an output each, with its C inputs, groups or tiles. Rows of fused projections are then
joined as those of plain ones are, and laid out for the type.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from paged.errors import ConfigError
from paged.models.quantized.channels import FLOAT8, INT8, TILE
from paged.models.quantized.groups import pack
from paged.models.quantized.making import MadeSpec, ToChannels, ToGroups, ToTiles
from paged.models.quantized.rules import modules_of
from paged.models.weights import Dense, Linear, ParamSpec, Part

_WORD, _WORD_BITS = np.dtype(np.int32), 32
# Where AWQ has the values of 8 neighbouring outputs in a word, counted from its lowest bits.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a module.

    Attributes:
        suffix: what its name ends in.
        shape: of it.
        dtype, any_shape: see `Part`.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: np.dtype | None = None
    any_shape: bool = False


class Layout(Protocol):
    """How a published format stores the arrays of a weight, each by its name in our type."""

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        """What an array of a module of this size is made of."""
        ...

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        """Rows [outputs, C] of the tensors; for "order", which input each row is for [K] int32."""
        ...

    def arrange(self, field: str, rows: jax.Array) -> jax.Array:
        """The array, of the rows [*N, C] of all modules that are joined in it."""
        ...


@dataclass(frozen=True, kw_only=True)
class StoredSpec(MadeSpec):
    """An array of a weight whose tensors in the checkpoint are quantised already.

    `of` says how modules are joined, and with `quantizer` how a random model starts.

    Attributes:
        layout: of the tensors.
    """

    layout: Layout

    def bytes_to_make(self, dtype: jnp.dtype) -> int:
        """See `ParamSpec.bytes_to_make`: of words, each value is spread to one before it is cut."""
        return _WORD.itemsize * math.prod(self.of.shape)

    def stored(self, name: str) -> ParamSpec:
        """See `ParamSpec.stored`: files hold the array itself."""
        return ParamSpec.stored(self, name)

    def spread(self, sharding: Any) -> tuple[Any, ...]:
        """See `ParamSpec.spread`: every device gets all, and keeps its share of what is made."""
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return (sharding,) * len(self.parts)

    def flaw(self, param: jax.Array) -> str | None:
        """See `ParamSpec.flaw`."""
        if self.field != "order" or param[0] >= 0:
            return None
        return (
            "projections that are multiplied as one are ordered differently (desc_act or "
            "actorder), which is not supported"
        )

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`. An order that is not that of all modules begins with -1."""
        step = len(self.parts) // len(self.of.parts)
        modules = [tensors[at : at + step] for at in range(0, len(tensors), step)]
        decoded = [
            self.layout.decode(self.field, part.shape[0], *given)
            for part, given in zip(self.of.parts, modules, strict=True)
        ]
        if self.field == "order":
            same = jnp.array([(each == decoded[0]).all() for each in decoded]).all()
            return jnp.where(same, decoded[0], -1)
        views = [
            rows[part.first_row :][: math.prod(part.view[:-1])].reshape(*part.view[:-1], -1)
            for part, rows in zip(self.of.parts, decoded, strict=True)
        ]
        return self.layout.arrange(self.field, jnp.concatenate(views, self.of.join_axis)).astype(
            dtype
        )


def stored(described: Linear, layout: Layout) -> Any:
    """A description of what is made on load, as one of what a checkpoint stores."""

    def of_tensors(made: Any) -> Any:
        if not isinstance(made, MadeSpec):  # a bias
            return made
        parts = tuple(
            Part(
                f"{part.name.removesuffix('weight')}{tensor.suffix}",
                tensor.shape,
                tensor.shape,
                dtype=tensor.dtype,
                any_shape=tensor.any_shape,
            )
            for part in made.of.parts
            for tensor in layout.tensors(made.field, *part.shape)
        )
        return StoredSpec(**{**vars(made), "parts": parts}, layout=layout)

    return jax.tree.map(of_tensors, described)


@dataclass(frozen=True)
class StoredChannels:
    """8 bits with a scale for each output, or one for all outputs of a module.

    Attributes:
        dtype: of the weights.
        per_tensor: one for all.
    """

    dtype: jnp.dtype
    per_tensor: bool

    def describe(self, weight: Dense) -> Linear:
        """See `Scheme`."""
        return stored(ToChannels(self.dtype).describe(weight), self)

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        if field == "weight":
            return (Tensor("weight", (outputs, inputs), self.dtype),)
        return (Tensor("weight_scale", (1 if self.per_tensor else outputs, 1), any_shape=True),)

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        [tensor] = tensors
        return tensor if field == "weight" else jnp.broadcast_to(tensor, (outputs, 1))

    def arrange(self, field: str, rows: jax.Array) -> jax.Array:
        return rows if field == "weight" else rows[..., 0]


@dataclass(frozen=True)
class StoredTiles:
    """Floats of 8 bits with a scale for each tile of 128 by 128.

    Attributes:
        scales: what the names of the scales end in.
    """

    scales: str

    def describe(self, weight: Dense) -> Linear:
        """See `Scheme`."""
        return stored(ToTiles().describe(weight), self)

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        if field == "weight":
            return (Tensor("weight", (outputs, inputs), FLOAT8),)
        return (Tensor(self.scales, (-(-outputs // TILE), -(-inputs // TILE))),)

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        [tensor] = tensors
        return tensor if field == "weight" else jnp.repeat(tensor, TILE, axis=0)[:outputs]

    def arrange(self, field: str, rows: jax.Array) -> jax.Array:
        return rows


@dataclass(frozen=True)
class StoredGroups(ABC):
    """What formats of integers with groups have in common: all but where the bits lie.

    Attributes:
        bits: of a value.
        group: inputs that share a scale; None for all.
        symmetric: zeros are the middle value, whether the file has them or not.
        ordered: inputs are in groups as the file says, not as they come.
    """

    bits: int
    group: int | None
    symmetric: bool = True
    ordered: bool = False

    def describe(self, weight: Dense) -> Linear:
        """See `Scheme`."""
        inputs = weight.kernel.shape[0]
        group, a_word = self.group or inputs, _WORD_BITS // self.bits
        for part in weight.kernel.parts:  # type: ignore[attr-defined]
            if part.shape[0] % a_word or inputs % a_word or inputs % group:
                raise ConfigError(
                    f"weights of {self.bits} bits in groups of {group} need outputs in multiples "
                    f"of {a_word} and inputs in whole groups, and {modules_of(weight)[0]!r} has "
                    f"{part.shape[0]} and {inputs}"
                )
        fields = ["weight", "scale"]
        fields += [] if self.symmetric else ["zero"]
        fields += ["order"] if self.ordered else []
        return stored(ToGroups(self.bits, group).describe(weight, *fields), self)

    @abstractmethod
    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        """See `Layout`."""

    @abstractmethod
    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        """See `Layout`."""

    def arrange(self, field: str, rows: jax.Array) -> jax.Array:
        inputs_first = jnp.moveaxis(rows, -1, 0)
        if field != "weight":
            return inputs_first
        return pack(inputs_first, self.bits, self.group or len(inputs_first))

    def _sizes(self, outputs: int, inputs: int) -> tuple[int, int, int]:
        """Groups, and words that hold the outputs and the inputs."""
        groups = inputs // (self.group or inputs)
        return groups, outputs * self.bits // _WORD_BITS, inputs * self.bits // _WORD_BITS

    def _by_groups(self, rows: jax.Array, owners: Sequence[jax.Array]) -> jax.Array:
        """Rows [N, K], the inputs of each group beside each other if `owners` has their groups."""
        return jnp.take(rows, _order(owners[0]), axis=1) if owners else rows


@dataclass(frozen=True)
class GptqGroups(StoredGroups):
    """GPTQ: weights packed along inputs and zeros along outputs.

    Attributes:
        one_less: zeros are stored one less than they are, as the first version has them.
    """

    one_less: bool = True

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        groups, output_words, input_words = self._sizes(outputs, inputs)
        owners = Tensor("g_idx", (inputs,), _WORD)
        weight = Tensor("qweight", (input_words, outputs), _WORD)
        return {
            "weight": (weight, owners) if self.ordered else (weight,),
            "scale": (Tensor("scales", (groups, outputs)),),
            "zero": (Tensor("qzeros", (groups, output_words), _WORD),),
            "order": (owners,),
        }[field]

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        first, *owners = tensors
        if field == "weight":
            return self._by_groups(_unpacked(first.T, self.bits), owners)
        if field == "zero":
            stored = _unpacked(first, self.bits).T
            return (stored + self.one_less) & (2**self.bits - 1)
        return _order(first) if field == "order" else first.T


@dataclass(frozen=True)
class AwqGroups(StoredGroups):
    """AWQ (gemm): weights and zeros packed along outputs, of which 8 are shuffled in a word."""

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        groups, output_words, _ = self._sizes(outputs, inputs)
        return {
            "weight": (Tensor("qweight", (inputs, output_words), _WORD),),
            "scale": (Tensor("scales", (groups, outputs)),),
            "zero": (Tensor("qzeros", (groups, output_words), _WORD),),
        }[field]

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        [tensor] = tensors
        return (tensor if field == "scale" else _unpacked(tensor, self.bits, _AWQ_PLACES)).T


@dataclass(frozen=True)
class PackedGroups(StoredGroups):
    """compressed-tensors (pack-quantized): weights packed along inputs, zeros along outputs."""

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        groups, output_words, input_words = self._sizes(outputs, inputs)
        owners = Tensor("weight_g_idx", (inputs,), _WORD)
        weight = Tensor("weight_packed", (outputs, input_words), _WORD)
        return {
            "weight": (weight, owners) if self.ordered else (weight,),
            "scale": (Tensor("weight_scale", (outputs, groups)),),
            "zero": (Tensor("weight_zero_point", (output_words, groups), _WORD),),
            "order": (owners,),
        }[field]

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        first, *owners = tensors
        if field == "weight":
            return self._by_groups(_unpacked(first, self.bits), owners)
        if field == "zero":
            return _unpacked(first.T, self.bits).T
        return _order(first) if field == "order" else first


@dataclass(frozen=True)
class Int8Groups(StoredGroups):
    """compressed-tensors (int-quantized) without quantised activations: all inputs in one group.

    Attributes:
        per_tensor: one scale is for all outputs of a module.
    """

    per_tensor: bool = False

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        scales = 1 if self.per_tensor else outputs
        return {
            "weight": (Tensor("weight", (outputs, inputs), INT8),),
            "scale": (Tensor("weight_scale", (scales, 1), any_shape=True),),
        }[field]

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        [tensor] = tensors
        if field == "weight":
            return (tensor.astype(jnp.int32) + 128).astype(jnp.uint8)
        return jnp.broadcast_to(tensor, (outputs, 1))


def _unpacked(words: jax.Array, bits: int, places: Sequence[int] | None = None) -> jax.Array:
    """Words [..., W] int32 to their values [..., W * 32 / bits] uint8, from the lowest bits on.

    Args:
        places: where in a word the first value lies, the second, ... if not in that order.
    """
    shifts = bits * jnp.asarray(places or range(_WORD_BITS // bits), jnp.int32)
    values = (words[..., None] >> shifts) & (2**bits - 1)
    return values.astype(jnp.uint8).reshape(*words.shape[:-1], -1)


def _order(owners: jax.Array) -> jax.Array:
    """Inputs [K] by the group that each is in, for groups [K] of inputs as they come."""
    return jnp.argsort(owners, stable=True).astype(jnp.int32)
