"""One model over several devices: each has its share of the heads, of the MLPs' inner elements, of
the vocabulary and of the experts, and all have the whole residual stream.

A step runs on all devices at once (`jax.shard_map` over a mesh of one axis, `TENSOR`), and each
sees a smaller model: `ModelConfig.share` of it, with weights, pages and kernels of that size. Only
weights know that there is more. Those whose inputs are shared out add up what all devices make
(`Summed`), once for attention and once for what follows; a vocabulary that is shared out adds up
once, for the embeddings (`SpreadEmbedding`).

Experts are shared out whole. A token's answers from the experts that are here are added to those
from elsewhere, together with what experts beside the mixture make (`SpreadExperts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from paged.errors import ConfigError
from paged.matmul import Groups, Order
from paged.models.config import ModelConfig
from paged.models.experts import Activation, DenseExperts
from paged.models.mesh import TENSOR, first_of, shares
from paged.models.quantized import (
    QUANTIZED,
    GroupCoded,
    GroupScaled,
    GroupShifted,
    Joined,
    TileScaled,
)
from paged.models.quantized.channels import TILE
from paged.models.quantized.groups import unit_of
from paged.models.scaled_experts import ScaledExperts
from paged.models.stages import Stage, of_stage
from paged.models.weights import Dense, Embedding, ParamSpec, Portable, param_shapes

# Inputs with these names are shared out, and nobody else adds up what comes of them.
_SUMMED = ("heads", "mlp")
_Q, _K, _V = slice(0, -2), slice(-2, -1), slice(-1, None)  # of the rows of a group of heads


@struct.dataclass
class Summed:
    """A weight of which every device has the rows of its own inputs.

    Attributes:
        part: this device's, without a bias.
        bias: [*N] or None, that of the whole.
    """

    part: Any
    bias: jax.Array | None

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        out = jax.lax.psum(self.part(x, dtype), TENSOR)
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def added_to(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        return residual + self(x)

    def gated(self, x: jax.Array, activation: str) -> jax.Array:
        raise NotImplementedError("the inputs of a gated MLP are never shared out")


@struct.dataclass
class SpreadEmbedding(Embedding):
    """An embedding of which every device has the rows of its own tokens.

    `unembed` gives the logits of these: [T, V / devices].
    """

    def lookup(self, tokens: jax.Array) -> jax.Array:
        row = tokens - first_of(len(self.table))
        found = self.table.at[jnp.where(row < 0, len(self.table), row)].get(
            mode="fill", fill_value=0
        )
        return jax.lax.psum(found, TENSOR)


@struct.dataclass
class SpreadExperts:
    """Experts of which every device has some.

    Attributes:
        here: this device's.
    """

    here: Any

    def in_groups(self, owners: jax.Array, most: int) -> Order:
        number = self.here.number
        local = owners - first_of(number)
        is_here = (local >= 0) & (local < number)
        order: Order = self.here.in_groups(jnp.where(is_here, local, number), most)
        return order

    def __call__(self, x: jax.Array, groups: Groups) -> jax.Array:
        out: jax.Array = self.here(x, groups)
        return out

    def gated(self, x: jax.Array, groups: Groups, activation: Activation) -> jax.Array:
        out: jax.Array = self.here.gated(x, groups, activation)
        return out

    def total(self, out: jax.Array) -> jax.Array:
        return jax.lax.psum(out, TENSOR)


@dataclass(frozen=True, kw_only=True)
class RepeatedSpec(ParamSpec):
    """What key/value heads have, for more devices than there are of them.

    Of fused projections [.., Hkv, G + 2, ..] each device takes its share of a group's query heads,
    and the group's key and value; of what belongs to keys alone [.., Hkv, ..], the group's.

    Attributes:
        of: as one device has them.
        repeats: devices that share a group.
    """

    of: ParamSpec
    repeats: int

    def bytes_to_make(self, dtype: jnp.dtype) -> int:
        """See `ParamSpec.bytes_to_make`."""
        return self.of.bytes_to_make(dtype)

    def anonymous(self) -> Self:
        """See `ParamSpec.anonymous`."""
        return replace(super().anonymous(), of=self.of.anonymous())

    def random(self, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.random`: as on one device."""
        return self._repeated(self.of.random(key, dtype))

    def spread(self, sharding: Any) -> tuple[Any, ...]:
        """See `ParamSpec.spread`: every device gets all, and keeps its share of what is made."""
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return (sharding,) * len(self.parts)

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`."""
        return self._repeated(self.of.assemble(tensors, dtype))

    def _repeated(self, made: jax.Array) -> jax.Array:
        if "key_heads" in self.axes:
            return jnp.repeat(made, self.repeats, axis=self.axes.index("key_heads"))
        return self._with_queries(made, self.axes.index("kv_heads"))

    def _with_queries(self, fused: jax.Array, axis: int) -> jax.Array:
        heads, rows = fused.shape[axis : axis + 2]
        by_rows = jnp.moveaxis(fused, (axis, axis + 1), (0, 1))
        queries = by_rows[:, _Q].reshape(
            heads * self.repeats, (rows - 2) // self.repeats, *by_rows.shape[2:]
        )
        keys, values = (jnp.repeat(by_rows[:, part], self.repeats, axis=0) for part in (_K, _V))
        joined = jnp.concatenate([queries, keys, values], axis=1)
        return jnp.moveaxis(joined, (0, 1), (axis, axis + 1))


def spread_specs(specs: Any, config: ModelConfig, mesh: Mesh | AbstractMesh | None) -> Any:
    """Description of the parameters as the devices of a mesh have them together; None for one.

    `specs` may be a file's. Devices that cannot share them evenly are for `check_devices`.
    """
    return specs if mesh is None else _with_repeats(specs, config, mesh.size)


def check_devices(specs: Any, config: ModelConfig, num_devices: int) -> None:
    """Refuse a number of devices that cannot share a model evenly.

    Raises:
        ConfigError: names the numbers of devices that would do.
    """
    obstacle = _obstacle(specs, config, num_devices)
    if obstacle is None:
        return
    others = range(2, config.num_heads + 1)
    possible = [each for each in others if _obstacle(specs, config, each) is None]
    raise ConfigError(
        f"--tensor-parallel-size {num_devices} does not go with this model: {obstacle}. "
        f"Use {' or '.join(map(str, (1, *possible)))}."
    )


def _with_repeats(specs: Any, config: ModelConfig, num_devices: int) -> Any:
    repeats = num_devices // config.num_kv_heads
    if repeats <= 1:
        return specs

    def repeated(spec: ParamSpec) -> ParamSpec:
        shape = list(spec.shape)
        if "key_heads" in spec.axes:
            shape[spec.axes.index("key_heads")] = num_devices
        elif "kv_heads" in spec.axes:
            axis = spec.axes.index("kv_heads")
            shape[axis : axis + 2] = num_devices, config.num_heads // num_devices + 2
        else:
            return spec
        return RepeatedSpec(
            parts=spec.parts,
            shape=tuple(shape),
            axes=spec.axes,
            init=spec.init,
            dtype=spec.dtype,
            of=spec,
            repeats=repeats,
        )

    return jax.tree.map(repeated, specs)


def _obstacle(specs: Any, config: ModelConfig, num_devices: int) -> str | None:
    """Why so many devices cannot share a model out; None if they can, as one always can."""
    if num_devices == 1:
        return None
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % num_devices:
        return f"it has {heads} attention heads"
    latent = config.latent_rank is not None
    if not latent and kv_heads % num_devices and num_devices % kv_heads:
        return f"it has {kv_heads} key/value heads"
    if num_devices > kv_heads and not latent and any(map(_has_kv_heads, _joined(specs))):
        return f"its {kv_heads} key/value heads are stored in several ways"
    nodes = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, Portable))
    for node in nodes:
        found = _uneven(node, num_devices) or _torn(node, num_devices)
        if found is not None:
            return found
    return None


def _joined(specs: Any) -> list[Joined]:
    """Projections that are stored in several ways."""
    nodes = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, Joined))
    return [node for node in nodes if isinstance(node, Joined)]


def _has_kv_heads(joined: Joined) -> bool:
    return any("kv_heads" in spec.axes for spec in jax.tree.leaves(joined))


def _uneven(node: Any, num_devices: int) -> str | None:
    """An axis of some array of a weight that devices cannot share out evenly."""
    for spec in jax.tree.leaves(node):
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            if axis == "joint_heads":
                return "all heads of its queries are normalised as one"
            may_be_uneven = axis in (None, "vocab", "kv_heads", "key_heads")
            if not may_be_uneven and size % num_devices:
                name = spec.parts[0].name
                return f"{name!r} is shared out along an axis of {size} ({axis})"
    return None


def _torn(node: Any, num_devices: int) -> str | None:
    """A quantised weight of which no device can have some inputs, and what they need, alone."""
    if not isinstance(node, QUANTIZED) or _input_axis(node) is None:
        return None
    name = node.weight.parts[0].name  # type: ignore[attr-defined]
    if isinstance(node, TileScaled) and node.weight.shape[-1] % (num_devices * TILE):
        return f"{name!r} has scales for tiles of {TILE} inputs, of {node.weight.shape[-1]}"
    if isinstance(node, GroupShifted | GroupCoded) and node.scale.shape[0] == 1:
        return f"{name!r} has one scale for all inputs"
    if isinstance(node, GroupScaled):
        if node.order is not None:
            return f"{name!r} has its inputs in an order of its own (desc_act or actorder)"
        inputs, unit = node.weight.shape[0] * 8 // node.bits, unit_of(node.group)
        if node.bits == 4 and inputs % (num_devices * unit):
            return f"{name!r} packs {inputs} inputs in units of {unit}"
    return None


def _input_axis(described: Any) -> str | None:
    """The logical name of the inputs of a described projection."""
    kernel: Any = described.kernel if isinstance(described, Dense) else described.weight.of
    axis: str | None = kernel.axes[0]
    return axis


def spread_shapes(
    described: Any,
    config: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    stage: Stage | None = None,
) -> Any:
    """The shapes of the parameters, as the devices of a mesh have them; None for one device.

    Args:
        stage: what the devices have of the model; None for all of it.
    """
    shapes = param_shapes(of_stage(spread_specs(described, config, mesh), stage), dtype, mesh)
    return spread_weights(of_stage(described, stage), shapes, mesh)


def bytes_of_each(described: Any, config: ModelConfig, dtype: jnp.dtype, num_devices: int) -> int:
    """Bytes of the parameters that each of so many devices has."""
    mesh = AbstractMesh((num_devices,), (TENSOR,))
    shapes = shares(param_shapes(spread_specs(described, config, mesh), dtype, mesh))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def spread_weights(described: Any, params: Any, mesh: Mesh | None) -> Any:
    """The same parameters (or their shapes), of types that know what other devices have.

    Args:
        described: by the family, not by a file.
        mesh: None for one device.
    """
    if mesh is None:
        return params

    def known(spec: Any, weights: Any) -> Any:
        if isinstance(spec, Embedding):
            shared = spec.table.sharding_on(mesh).spec[0]  # type: ignore[attr-defined]
            return SpreadEmbedding(weights.table) if shared else weights
        if isinstance(spec, DenseExperts | ScaledExperts):
            return SpreadExperts(weights)
        if isinstance(spec, Dense | QUANTIZED) and _input_axis(spec) in _SUMMED:
            return Summed(replace(weights, bias=None), weights.bias)
        return weights

    return jax.tree.map(
        known, described, params, is_leaf=lambda node: isinstance(node, Portable | Embedding)
    )
