"""Experts whose weights are quantised: each type of `paged.models.quantized`, one for each expert.

An expert's weight is expanded when its rows are multiplied; activations are never quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from paged import matmul
from paged.errors import ConfigError
from paged.matmul import Groups, Order
from paged.models.activations import gate
from paged.models.experts import Activation, DenseExperts, HopperExperts, StackedSpec, hopper_order
from paged.models.quantized import (
    E2M1,
    GgmlTensors,
    GroupCoded,
    Quantization,
    plain_kernel,
)
from paged.models.quantized.making import MadeSpec, Quantizer
from paged.models.quantized.stored import StoredSpec
from paged.models.weights import Dense, ParamSpec, Portable

# Rows that are multiplied by an expert's weight each time that it is expanded.
_ROWS = 64


@struct.dataclass
class ScaledExperts(Portable):
    """Quantised weights of experts, of which one at a time is expanded, if it has rows.

    Attributes:
        weights: a quantised weight whose arrays have the experts along a first axis.
        bias: [X, *N] or None.
    """

    in_few_bits = True

    weights: Any
    bias: jax.Array | None = None

    def in_groups(self, owners: jax.Array, most: int) -> Order:
        """See `Experts`."""
        return matmul.in_groups(owners, self.number, most=most)

    @property
    def number(self) -> int:
        """X."""
        return len(jax.tree.leaves(self.weights)[0])

    def __call__(self, x: jax.Array, groups: Groups) -> jax.Array:
        rows = len(x)
        height = min(_ROWS, rows)
        tiles = (groups.sizes + height - 1) // height
        ends = jnp.cumsum(tiles)
        starts = groups.ends - groups.sizes - (ends - tiles) * height
        x = jnp.pad(x, ((0, height), (0, 0)))
        [*outputs] = jax.eval_shape(lambda: self._kernel(0, x.dtype)).shape[1:]

        def add_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
            # Rows below the group's own are the next group's, whose tile comes later.
            expert = jnp.sum(ends <= tile)
            start = starts[expert] + tile * height
            given = jax.lax.dynamic_slice_in_dim(x, start, height)
            product = jnp.tensordot(given, self._kernel(expert, x.dtype), axes=1)
            return jax.lax.dynamic_update_slice_in_dim(out, product, start, axis=0)

        out = jnp.zeros((rows + height, *outputs), x.dtype)
        out = jax.lax.fori_loop(0, ends[-1], add_tile, out)[:rows]
        return out if self.bias is None else out + self.bias[groups.owners(rows)]

    def gated(self, x: jax.Array, groups: Groups, activation: Activation) -> jax.Array:
        """See `Experts`."""
        return gate(self(x, groups), activation)

    def total(self, out: jax.Array) -> jax.Array:
        """See `Experts`."""
        return out

    def on_hopper(self, device_kind: str) -> ScaledExperts:
        """See `Portable`."""
        return HopperScaledExperts(self.weights, self.bias, device_kind=device_kind)

    def _kernel(self, expert: int | jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[K, *N] of one expert."""
        return plain_kernel(jax.tree.map(lambda each: each[expert], self.weights), dtype)


@struct.dataclass
class HopperScaledExperts(ScaledExperts):
    """As `ScaledExperts`, on a Hopper GPU.

    Of MXFP4, a few rows are multiplied by a kernel of ours; else all weights are expanded, for the
    kernel of plain ones.

    Attributes:
        device_kind: JAX's name of the GPU, by which the kernel is tuned (static).
    """

    device_kind: str = struct.field(pytree_node=False, kw_only=True)

    def in_groups(self, owners: jax.Array, most: int) -> Order:
        """See `Experts`."""
        return hopper_order(owners, self.number, most)

    def __call__(self, x: jax.Array, groups: Groups) -> jax.Array:
        out = self._few(x, groups)
        return self._expanded(x.dtype)(x, groups) if out is None else out

    def gated(self, x: jax.Array, groups: Groups, activation: Activation) -> jax.Array:
        """See `Experts`."""
        out = self._few(x, groups)
        if out is None:
            return self._expanded(x.dtype).gated(x, groups, activation)
        return gate(out, activation)

    def _few(self, x: jax.Array, groups: Groups) -> jax.Array | None:
        """The product by the kernel for few rows; None where there is none."""
        weights = self.weights
        if not isinstance(weights, GroupCoded) or weights.codes != E2M1:
            return None
        packed, scale = (
            each.reshape(*each.shape[:2], -1) for each in (weights.weight, weights.scale)
        )
        if not matmul.supports_codes(x, packed, scale):
            return None
        out = matmul.grouped_codes_matmul(x, packed, scale, groups)
        out = out.reshape(len(x), *weights.scale.shape[2:])
        if self.bias is not None:
            out += self.bias[groups.owners(len(x))].astype(out.dtype)
        return out.astype(x.dtype)

    def _expanded(self, dtype: jnp.dtype) -> HopperExperts:
        kernel = jax.vmap(lambda each: plain_kernel(each, dtype))(self.weights)
        return HopperExperts(kernel, self.bias, device_kind=self.device_kind)


@dataclass(frozen=True)
class _OfEach:
    """A quantizer for the stacked kernels of experts, one after the other."""

    quantizer: Quantizer

    def __call__(self, kernel: jax.Array) -> Any:
        return jax.lax.map(self.quantizer, kernel)


@dataclass(frozen=True, kw_only=True)
class _MadeStack(MadeSpec):
    """An array of the weights of experts that are quantised as they are loaded."""

    def stored(self, name: str) -> ParamSpec:
        """See `ParamSpec.stored`: the kernel's place is that of `ScaledExperts.weights`."""
        return super().stored(f"{name.rsplit('.', 2)[0]}.{self.field}")


@dataclass(frozen=True, kw_only=True)
class _StoredStack(StackedSpec):
    """Arrays of the quantised weights of experts, as a checkpoint has them."""

    def random(self, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.random`."""
        keys = jax.random.split(key, self.shape[0])
        return jax.lax.map(lambda each: self.each.random(each, dtype), keys)

    def spread(self, sharding: Any) -> tuple[Any, ...]:
        """See `ParamSpec.spread`."""
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return (sharding,) * len(self.parts)

    def anonymous(self) -> Self:
        """See `ParamSpec.anonymous`."""
        return replace(super().anonymous(), each=self.each.anonymous())

    def flaw(self, param: jax.Array) -> str | None:
        """See `ParamSpec.flaw`."""
        if not isinstance(self.each, StoredSpec) or self.each.field != "order":
            return None
        return self.each.flaw(jnp.min(param, axis=0))

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`: traced once for all experts."""
        step = len(self.each.parts)
        stacks = [jnp.stack(tensors[index::step]) for index in range(step)]
        return jax.vmap(lambda *each: self.each.assemble(each, dtype))(*stacks)


def quantized_experts(specs: Any, quantization: Quantization | None) -> Any:
    """The same parameters, with the weights of experts stored as `quantization` says.

    Raises:
        ConfigError: a checkpoint has experts stored in different ways.
    """
    if quantization is None:
        return specs

    def stored(node: Any) -> Any:
        return _stored_experts(node, quantization) if isinstance(node, DenseExperts) else node

    return jax.tree.map(stored, specs, is_leaf=lambda node: isinstance(node, DenseExperts))


def _stored_experts(experts: DenseExperts, quantization: Quantization) -> Any:
    kernel: Any = experts.kernel
    modules = [part.name.removesuffix(".weight") for part in kernel.parts]
    schemes = set(quantization.schemes(modules))
    in_gguf = any(isinstance(each, GgmlTensors) for each in schemes)
    if schemes == {None} or (in_gguf and len(schemes) > 1):  # the latter are expanded
        return experts
    if len(schemes) > 1:
        raise ConfigError(
            f"the checkpoint has experts quantized by {quantization.name} in several ways, as of "
            f"{modules[0]!r} and its siblings: that is not supported"
        )
    [scheme] = schemes
    assert scheme is not None
    if quantization.made_on_load:
        one: Any = ParamSpec(kernel.parts[:1], kernel.shape[1:], kernel.axes[1:], kernel.init)
        made = scheme.describe(Dense(one))
        weights = jax.tree.map(lambda each: _made_of_all(each, kernel), made)
        return ScaledExperts(weights, experts.bias)
    return ScaledExperts(_stacked(kernel, scheme), experts.bias)


def _made_of_all(made: MadeSpec, kernel: ParamSpec) -> MadeSpec:
    """From one array made of the kernel of an expert to that of all."""
    return _MadeStack(
        parts=kernel.parts,
        shape=(kernel.shape[0], *made.shape),
        axes=("experts", *[None] * len(made.axes)),
        init=made.init,
        dtype=made.dtype,
        of=kernel,
        quantizer=_OfEach(made.quantizer),
        field=made.field,
    )


def _stacked(kernel: StackedSpec, scheme: Any) -> Any:
    """The weights of experts as a checkpoint has them."""
    step = len(kernel.each.parts)
    kernels: list[Any] = [
        replace(kernel.each, parts=kernel.parts[at : at + step])
        for at in range(0, len(kernel.parts), step)
    ]
    weights = [scheme.describe(Dense(each)) for each in kernels]

    def stack(*specs: ParamSpec) -> Any:
        first = specs[0]
        return _StoredStack(
            parts=tuple(part for spec in specs for part in spec.parts),
            shape=(len(specs), *first.shape),
            axes=("experts", *[None] * len(first.axes)),
            init=first.init,
            dtype=first.dtype,
            each=first.anonymous(),
        )

    return jax.tree.map(stack, *weights)
