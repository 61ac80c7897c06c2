"""What steps of a model read and multiply, by the declaration of its parameters.

Bytes are those that the engine would load, of each device. Products are counted from the same
model in full precision: however few bits a weight has, as many numbers are multiplied by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from paged.models.config import ModelConfig
from paged.models.experts import Routing, slower_products
from paged.models.mesh import shares
from paged.models.quantized import ChannelScaled, TileScaled, expanded_weights
from paged.models.registry import get_family
from paged.models.spread import spread_shapes, spread_specs
from paged.models.weights import Portable, param_shapes
from paged.runtime.steps import StepShapes

Products = Literal["full", "fp8", "int8", "unpacked", "expanded"]
"""What layers multiply in: 16 bits or more, 8 bits, or 16 after fewer have been unpacked, by the
kernel that multiplies or, before it, in memory."""


@dataclass(frozen=True)
class Work:
    """Of one device.

    Attributes:
        layer_bytes: weights of layers that each step reads, those of experts left out.
        expert_bytes: weights of all experts.
        head_bytes: weights that logits are made with.
        layer_flop: products of a token in layers.
        expert_flop: of them those with the experts that it chooses.
        head_flop: products of a row that is sampled.
        pair_flop: attention of a token to a token, in a layer.
        kv_bytes: of a token in the pages of a layer.
        windows: how many tokens one sees in each layer, itself included; None sees all.
        width: elements of the residual stream.
        mixtures: layers that have experts.
        routing: how tokens choose them; None where there are none.
        products: of the layers.
        expanded_bytes: weights as they are once expanded in memory; 0 where they are not.
        all_experts: every token is multiplied by every expert, for want of a kernel.
        devices: that share the model.
    """

    layer_bytes: int
    expert_bytes: int
    head_bytes: int
    layer_flop: float
    expert_flop: float
    head_flop: float
    pair_flop: float
    kv_bytes: float
    windows: tuple[int | None, ...]
    width: int
    mixtures: int
    routing: Routing | None
    products: Products
    expanded_bytes: int
    all_experts: bool
    devices: int

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.windows)

    def seen(self, context: float) -> float:
        """Tokens that one sees to which so many, itself included, have come; of all layers."""
        return sum(context if window is None else min(context, window) for window in self.windows)

    def flop(self, lengths: Sequence[int], context: int) -> float:
        """Of a step whose rows have so many tokens each, after a context."""
        products = sum(lengths) * self.layer_flop + len(lengths) * self.head_flop
        seen = (context + place for length in lengths for place in range(1, length + 1))
        pairs = sum(map(self.seen, seen))
        return products + pairs * self.pair_flop

    def bytes(self, lengths: Sequence[int], context: int) -> float:
        """That such a step reads and writes: weights, keys and values."""
        tokens = sum(lengths)
        read = len(lengths) * (self.seen(context + 1) - self.layers)  # its own are at hand
        pages = (read + tokens * self.layers) * self.kv_bytes
        return self.layer_bytes + self.expert_bytes_of(tokens) + self.head_bytes + pages

    def expert_bytes_of(self, tokens: int) -> float:
        """Weights of the experts that so many tokens choose, if they do so at random."""
        if self.routing is None or self.all_experts:
            return float(self.expert_bytes)
        left_out = (1 - self.routing.num_chosen / self.routing.num_experts) ** tokens
        return self.expert_bytes * (1 - left_out)


def work_of(model: ModelConfig, shapes: StepShapes, dtype: jnp.dtype, device: jax.Device) -> Work:
    """What a model in `dtype` is for each device of the steps' placement.

    Args:
        model: the whole of it, where the shapes have what each device sees.
        device: one of them, or what stands for it.
    """
    mesh, cache = shapes.placement.mesh, shapes.cache
    specs, plain = specs_of(model), specs_of(replace(model, quantization=None))
    stored, numbers = _Sizes.of(specs, model, dtype, mesh), _Sizes.of(plain, model, None, mesh)
    devices, routing = 1 if mesh is None else mesh.size, routing_of(model)
    mixtures = sum(any(map(_is_of_experts, jax.tree.leaves(layer))) for layer in plain.layers)
    params = spread_shapes(specs, model, dtype, mesh)
    all_experts = bool(slower_products(shares(params), device))
    expert_flop = 0.0
    if routing is not None:
        multiplied = routing.num_experts if all_experts else routing.num_chosen
        expert_flop = mixtures * multiplied * _expert_flop(model, routing) / devices
    products = "expanded" if expanded_weights(params, device) else _products(specs)
    heads = model.num_heads / devices
    return Work(
        layer_bytes=stored.layers,
        expert_bytes=stored.experts,
        head_bytes=stored.head,
        layer_flop=2 * numbers.layers + expert_flop,
        expert_flop=expert_flop,
        head_flop=2 * numbers.head,
        pair_flop=2 * heads * (model.head_dim + (model.latent_rank or model.head_dim)),
        kv_bytes=cache.bytes_per_page / (cache.page_size * cache.num_layers),
        windows=model.windows,
        width=model.hidden_size,
        mixtures=mixtures,
        routing=routing,
        products=products,
        expanded_bytes=numbers.layers * dtype.itemsize if products == "expanded" else 0,
        all_experts=all_experts,
        devices=devices,
    )


@lru_cache(maxsize=8)
def specs_of(model: ModelConfig) -> Any:
    """Description of a model's parameters, made once for all plans: of many experts it is long."""
    return get_family(model.architecture).specs(model)


def routing_of(model: ModelConfig) -> Routing | None:
    """How tokens choose experts, or None of a model without."""
    found = getattr(model.extras, "routing", model.extras)
    return found if isinstance(found, Routing) else None


def _expert_flop(model: ModelConfig, routing: Routing) -> float:
    """Products of a token with one expert: gate, up and down projection."""
    return 2 * 3 * model.hidden_size * routing.expert_size


@dataclass(frozen=True)
class _Sizes:
    """Bytes, or numbers, by what needs them; see `Work`."""

    layers: int
    experts: int
    head: int

    @classmethod
    def of(
        cls,
        specs: Any,
        model: ModelConfig,
        dtype: jnp.dtype | None,
        mesh: Mesh | AbstractMesh | None,
    ) -> _Sizes:
        """Bytes of all, the others being in `dtype`; without one, numbers of matrices."""
        specs = spread_specs(specs, model, mesh)
        shapes = shares(param_shapes(specs, dtype or jnp.dtype(jnp.int8), mesh))

        def total(specs: Any, shapes: Any, *, experts: bool = False) -> int:
            pairs = zip(jax.tree.leaves(specs), jax.tree.leaves(shapes), strict=True)
            chosen = (shape for spec, shape in pairs if _is_of_experts(spec) == experts)
            return sum(_size(each, as_bytes=dtype is not None) for each in chosen)

        head = "embedding" if specs.head is None else "head"
        return cls(
            layers=total(specs.layers, shapes.layers),
            experts=total(specs.layers, shapes.layers, experts=True),
            head=total(getattr(specs, head), getattr(shapes, head)),
        )


def _size(shape: jax.ShapeDtypeStruct, *, as_bytes: bool) -> int:
    size = math.prod(shape.shape)
    return size * shape.dtype.itemsize if as_bytes else size * (len(shape.shape) > 1)


def _is_of_experts(spec: Any) -> bool:
    return "experts" in spec.axes


def _products(specs: Any) -> Products:
    """What most layers multiply in."""
    for node in _quantised(jax.tree.leaves(specs, is_leaf=lambda n: isinstance(n, Portable))):
        if isinstance(node, ChannelScaled | TileScaled):
            dtype: Any = node.weight.dtype
            return "int8" if dtype == jnp.int8 else "fp8"
        return "unpacked"
    return "full"


def _quantised(nodes: Iterable[Any]) -> list[Portable]:
    return [node for node in nodes if isinstance(node, Portable) and node.in_few_bits]
