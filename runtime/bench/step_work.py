"""What a step must do and move, worked out from the shapes of its model.

Counted are matrix products and attention, the weights that a step reads, and the keys and values
that it reads and writes; nothing for norms, sampling and what goes back and forth within a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from paged.models.weights import ParamSpec
from paged.runtime.planning.work import routing_of
from paged.runtime.steps import StepShapes


@dataclass(frozen=True)
class ModelWork:
    """What one device does for a model.

    Attributes:
        token_weights: numbers that each token is multiplied with, of experts those it chooses.
        logits_weights: numbers that each row's last token is multiplied with.
        weight_bytes: weights that every step reads.
        expert_bytes: those of all experts, of which a step reads the ones that its tokens choose.
        experts, chosen: how many there are in a layer, and how many a token chooses; else 0.
        kv_bytes: keys and values of a token in one layer.
        pair_flops: attention of a token to another in one layer.
        windows: of each layer; None sees all.
    """

    token_weights: float
    logits_weights: float
    weight_bytes: float
    expert_bytes: float
    experts: int
    chosen: int
    kv_bytes: float
    pair_flops: float
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, shapes: StepShapes, params: Any, logits_weights: float) -> ModelWork:
        """Of weights as they are; `logits_weights` is D * V."""
        model, cache, devices = shapes.model, shapes.cache, shapes.placement.num_devices
        routing = routing_of(model)
        experts, chosen = (routing.num_experts, routing.num_chosen) if routing else (0, 0)
        plain, of_experts = _layer_weights(shapes)
        share = of_experts / (plain + of_experts)
        layer_bytes = _bytes_here(params.layers)
        head_bytes = _bytes_here(params.head or params.embedding)
        width = model.head_dim + (model.latent_rank or model.head_dim)
        return cls(
            token_weights=(plain + (of_experts * chosen / experts if experts else 0)) / devices,
            logits_weights=logits_weights / devices,
            weight_bytes=layer_bytes * (1 - share) + head_bytes,
            expert_bytes=layer_bytes * share,
            experts=experts,
            chosen=chosen,
            kv_bytes=cache.bytes_per_page / cache.page_size / cache.num_layers,
            pair_flops=2 * model.num_heads * width,
            windows=model.windows,
        )

    def flops(self, lengths: Sequence[int], context: int) -> float:
        """Of a step whose rows have so many tokens each, after a context."""
        products = sum(lengths) * self.token_weights + len(lengths) * self.logits_weights
        pairs = sum(_pairs(length, context, each) for length in lengths for each in self.windows)
        return 2 * products + pairs * self.pair_flops

    def bytes(self, lengths: Sequence[int], context: int) -> float:
        """Likewise."""
        tokens = sum(lengths)
        used = 1 - (1 - self.chosen / self.experts) ** tokens if self.experts else 0
        seen = sum(_seen(each, context, window) for each in lengths for window in self.windows)
        written = tokens * len(self.windows)
        return self.weight_bytes + used * self.expert_bytes + (seen + written) * self.kv_bytes


def _layer_weights(shapes: StepShapes) -> tuple[float, float]:
    """Numbers in the matrices of all layers and devices: those of experts apart."""
    model = replace(shapes.model, quantization=None)
    devices = shapes.placement.num_devices
    whole = replace(
        model, num_heads=model.num_heads * devices, num_kv_heads=model.num_kv_heads * devices
    )
    specs = shapes.family.specs(whole).layers
    leaves = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, ParamSpec))
    matrices = [leaf for leaf in leaves if len(leaf.shape) > 1]
    of_experts = sum(np.prod(leaf.shape) for leaf in matrices if leaf.axes[0] == "experts")
    return float(sum(np.prod(leaf.shape) for leaf in matrices) - of_experts), float(of_experts)


def _bytes_here(params: Any) -> int:
    """Bytes that the first device has of some weights."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))


def _pairs(length: int, context: int, window: int | None) -> float:
    """Tokens that each token of a row sees in a layer, itself included, summed."""
    seen = np.arange(context + 1, context + length + 1)
    return float(np.minimum(seen, window or seen[-1]).sum())


def _seen(length: int, context: int, window: int | None) -> int:
    """Tokens of the context that a row reads in a layer."""
    return context if window is None else min(context, window - 1)
