"""Mixtures of experts: each token runs through the few MLPs that its router chooses for it.

Pairs of a token and an expert of its choice are put in groups, so that the rows of an expert follow
each other and one grouped product multiplies each by the weights of its own expert. Shapes depend
on how many tokens there are, and never on what they choose.

Axis letters, besides those of `paged.models.weights`: X experts, C experts that a token chooses,
P = T * C pairs, R rows that they take in groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding

from paged import matmul
from paged.attention import AttentionMetadata
from paged.cache import DROPPED
from paged.errors import ConfigError
from paged.matmul import Groups, Order
from paged.models.activations import ClampedSwiglu, gate
from paged.models.config import ModelConfig
from paged.models.layers import AttentionParams, LayerParams, rms_norm
from paged.models.weights import Dense, Linear, ParamSpec, Portable, fused_linear, linear

Activation = str | ClampedSwiglu


class Experts(Protocol):
    """The weights of all experts at one place, each of which multiplies the rows that are its."""

    def in_groups(self, owners: jax.Array, most: int) -> Order:
        """Rows in groups as these weights take them.

        `owners` [P] int32 are their experts, or X for a row that is nobody's; no expert has more
        than `most`.
        """
        ...

    def __call__(self, x: jax.Array, groups: Groups) -> jax.Array:
        """x [R, K] to [R, *N]: each expert's group of rows, by its weights.

        Rows that are nobody's become anything.
        """
        ...

    def gated(self, x: jax.Array, groups: Groups, activation: Activation) -> jax.Array:
        """activation(gate) * up [R, F], for weights of [K, 2, F]; see `gate`."""
        ...

    def total(self, out: jax.Array) -> jax.Array:
        """What all experts answer, of what these answer, where they are not all there are."""
        ...


@struct.dataclass
class DenseExperts(Portable):
    """Plain weights.

    Attributes:
        kernel: [X, K, *N].
        bias: [X, *N] or None.
    """

    kernel: jax.Array
    bias: jax.Array | None = None

    def in_groups(self, owners: jax.Array, most: int) -> Order:
        return matmul.in_groups(owners, len(self.kernel), most=most)

    def __call__(self, x: jax.Array, groups: Groups) -> jax.Array:
        experts, inputs, *outputs = self.kernel.shape
        out = jax.lax.ragged_dot(x, self.kernel.reshape(experts, inputs, -1), groups.sizes)
        return self._with_bias(out.reshape(-1, *outputs), groups)

    def gated(self, x: jax.Array, groups: Groups, activation: Activation) -> jax.Array:
        return gate(self(x, groups), activation)

    def total(self, out: jax.Array) -> jax.Array:
        return out

    def on_hopper(self, device_kind: str) -> DenseExperts:
        """See `Portable`."""
        return HopperExperts(self.kernel, self.bias, device_kind=device_kind)

    def _with_bias(self, out: jax.Array, groups: Groups) -> jax.Array:
        return out if self.bias is None else out + self.bias[groups.owners(len(out))]


@struct.dataclass
class HopperExperts(DenseExperts):
    """Plain weights on a Hopper GPU, which multiply by a kernel of ours if it takes them.

    What it does not take is left to XLA, which multiplies all rows by the weights of all experts.

    Attributes:
        device_kind: JAX's name of the GPU, by which the kernel is tuned (static).
    """

    device_kind: str = struct.field(pytree_node=False, kw_only=True)

    def in_groups(self, owners: jax.Array, most: int) -> Order:
        if len(owners) <= matmul.MOST_ROWS:
            return matmul.in_groups_at_once(owners, len(self.kernel), most=most)
        return matmul.in_groups(owners, len(self.kernel), most=most, unit=matmul.ROW_UNIT)

    def __call__(self, x: jax.Array, groups: Groups) -> jax.Array:
        if not matmul.supports_groups(x.dtype, self.kernel):
            return DenseExperts.__call__(self, x, groups)
        experts, inputs, *outputs = self.kernel.shape
        out = self._product(x, self.kernel.reshape(experts, inputs, -1), groups)
        return self._with_bias(out.reshape(-1, *outputs), groups)

    def gated(self, x: jax.Array, groups: Groups, activation: Activation) -> jax.Array:
        supported = matmul.supports_groups(x.dtype, self.kernel)
        if not supported or self.bias is not None or activation != "silu":
            return DenseExperts.gated(self, x, groups, activation)
        return self._product(x, self.kernel, groups)

    def _product(self, x: jax.Array, kernel: jax.Array, groups: Groups) -> jax.Array:
        experts, inputs, *halves, outputs = kernel.shape
        tiling = matmul.grouped_tiling_for(
            len(x), experts, inputs, outputs, device_kind=self.device_kind, gated=bool(halves)
        )
        return matmul.grouped_matmul(x, kernel, groups, tiling)


@struct.dataclass
class Mixture:
    """The weights of a mixture.

    Attributes:
        router: D to X.
        gate_up: D to [2, F], of each expert.
        down: F to D, of each expert; it takes rows in groups as `gate_up` does.
    """

    router: Linear
    gate_up: Experts
    down: Experts


@struct.dataclass
class SparseLayerParams(AttentionParams):
    """Weights of a pre-norm layer whose MLP is a mixture.

    Attributes:
        mlp_norm: [D].
        mixture: see `Mixture`.
    """

    mlp_norm: jax.Array
    mixture: Mixture


@dataclass(frozen=True)
class Routing:
    """How tokens choose.

    Attributes:
        num_experts: X.
        num_chosen: C.
        expert_size: F of each expert.
        renormalise: what a token's experts answer is weighted by shares among these alone, rather
            than among all experts.
    """

    num_experts: int
    num_chosen: int
    expert_size: int
    renormalise: bool

    def __post_init__(self) -> None:
        if self.num_chosen > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok {self.num_chosen} is more than the {self.num_experts} "
                "experts there are"
            )

    def choose(
        self, scores: jax.Array, bias: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Of the router's scores [T, X] float32: weights [T, C] float32, experts [T, C] int32.

        `bias` [X] float32, where a family has one, counts for the choice and not for the weights.
        """
        assert bias is None, "a plain choice has no bias"
        highest, experts = jax.lax.top_k(scores, self.num_chosen)
        among = highest if self.renormalise else scores
        total = jax.nn.logsumexp(among, axis=-1, keepdims=True)
        return jnp.exp(highest - total), experts


def mix(
    params: Mixture,
    routing: Routing,
    x: jax.Array,
    meta: AttentionMetadata,
    activation: Activation,
    bias: jax.Array | None = None,
) -> jax.Array:
    """What the experts chosen for each of x [T, D] answer, added up by their weights; [T, D].

    Of the experts that are here: `Experts.total` makes of that what all of them answer. Padding
    tokens give no expert work, and get 0. For `bias` see `Routing.choose`.
    """
    is_token = meta.write_index[:, None] < DROPPED
    weights, chosen = routing.choose(params.router(x, jnp.dtype(jnp.float32)), bias)
    owners = jnp.where(is_token, chosen, routing.num_experts).reshape(-1)
    order = params.gate_up.in_groups(owners, most=len(x))
    rows = x.at[order.rows // routing.num_chosen].get(mode="clip")
    inner = params.gate_up.gated(rows, order.groups, activation)
    answers = params.down(inner, order.groups)
    places = order.places.reshape(weights.shape)
    out = jnp.zeros(x.shape, jnp.float32)
    for i in range(routing.num_chosen):  # one pass over the answers, which are never widened whole
        answer = answers.at[places[:, i]].get(mode="fill", fill_value=0)
        out += weights[:, i, None] * answer.astype(jnp.float32)
    return jnp.where(is_token, out, 0).astype(x.dtype)


def add_mixture(
    params: SparseLayerParams,
    x: jax.Array,
    routing: Routing,
    meta: AttentionMetadata,
    config: ModelConfig,
    activation: Activation,
) -> jax.Array:
    """x [T, D] plus what the mixture of a pre-norm layer makes of it."""
    normed = rms_norm(x, params.mlp_norm, config.norm_eps)
    return x + params.mixture.down.total(mix(params.mixture, routing, normed, meta, activation))


def slower_products(params: Any, device: jax.Device) -> list[str]:
    """What of the products of experts a GPU could do faster, and why it does not.

    `params` are a model's, or their shapes.
    """
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, DenseExperts))
    kernels = [node.kernel for node in nodes if isinstance(node, DenseExperts)]
    every = "XLA multiplies all rows by every expert"
    if kernels and not matmul.available(device):
        return [f"{every}: our kernel needs a Hopper GPU, of compute capability 9.0"]
    left = {
        f"{kernel.dtype} {list(kernel.shape[1:])}"
        for kernel in kernels
        if not matmul.supports_groups(kernel.dtype, kernel)
    }
    needs = "our kernel takes 16-bit floats in multiples of 64"
    return [f"{every}: {needs}, not {', '.join(sorted(left))}"] if left else []


def mixture_specs(
    prefix: str,
    config: ModelConfig,
    routing: Routing,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> Mixture:
    """Description of a mixture: `prefix`.gate routes to `prefix`.experts.0 and its siblings.

    Args:
        gate, up, down: what the checkpoint calls the projections of an expert.
    """
    hidden_size, size = config.hidden_size, routing.expert_size
    experts = [f"{prefix}.experts.{index}" for index in range(routing.num_experts)]
    gate_up = [
        fused_linear(
            {f"{expert}.{gate}": (1, size), f"{expert}.{up}": (1, size)},
            hidden_size,
            bias=False,
            join_axis=0,
            axes=(None, None, "mlp"),
        )
        for expert in experts
    ]
    downs = [linear(f"{each}.{down}", size, hidden_size, axes=("mlp", None)) for each in experts]
    return Mixture(
        router=linear(f"{prefix}.gate", hidden_size, routing.num_experts),
        gate_up=stacked(gate_up),
        down=stacked(downs),
    )


def sparse_layer_specs(layer: LayerParams, mixture: Mixture) -> SparseLayerParams:
    """Description of a layer that has a mixture in place of its MLP."""
    return SparseLayerParams(
        attention_norm=layer.attention_norm,
        qkv=layer.qkv,
        out=layer.out,
        mlp_norm=layer.mlp_norm,
        mixture=mixture,
    )


@dataclass(frozen=True, kw_only=True)
class StackedSpec(ParamSpec):
    """Parameters of one make, of which each expert has one, along a first axis.

    Attributes:
        each: the parameter of one expert. `parts` are those of the first expert, of the second, ...
    """

    each: ParamSpec

    def spread(self, sharding: Any) -> tuple[Any, ...]:
        """See `ParamSpec.spread`.

        Where experts are shared out, each device first gets a share of each, and they exchange
        these: an array cannot be on some of the devices alone.
        """
        if isinstance(sharding, NamedSharding):
            sharding = self.each.sharding_on(sharding.mesh)
        return self.each.spread(sharding) * self.shape[0]

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`."""
        step = len(self.each.parts)
        starts = range(0, len(tensors), step)
        return jnp.stack([self.each.assemble(tensors[at : at + step], dtype) for at in starts])


def stacked(weights: Sequence[Dense]) -> DenseExperts:
    """Description of the weights of experts, from that of the weight of each (without biases)."""
    specs: list[Any] = [weight.kernel for weight in weights]
    first: ParamSpec = specs[0]
    anonymous = tuple(replace(part, name="") for part in first.parts)
    kernel: Any = StackedSpec(
        parts=tuple(part for spec in specs for part in spec.parts),
        shape=(len(specs), *first.shape),
        axes=("experts", *[None] * len(first.axes)),
        init=first.init,
        each=replace(first, parts=anonymous),
    )
    return DenseExperts(kernel)
