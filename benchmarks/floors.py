"""The least time that requests can take on a card that reads and multiplies so fast.

What is counted: every matrix product and prefill's attention at the speed of a large product; for
each decode step all weights (of experts, those that are used) or, if that takes longer, its
products; and each decoded token's keys and values, read at the speed of a large sum. Products and
attention of a step do not overlap, since one layer's follow the other's. Nothing is counted for the
host, for sampling or between kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_PER_NUMBER = 2
"""Weights and cache are bfloat16."""


@dataclass(frozen=True)
class Ceilings:
    """What a card can do: bytes it sums, and FLOP of a large product, per second."""

    bytes_per_second: float
    flop_per_second: float


@dataclass(frozen=True)
class Request:
    """A request's part of the work.

    Attributes:
        prompt: its tokens.
        outputs: tokens it generates; the first comes of the prompt's step.
        cached: tokens of the prompt that are in pages already.
        shared: those of them that belong to another request too.
    """

    prompt: int
    outputs: int
    cached: int = 0
    shared: int = 0


@dataclass(frozen=True)
class ModelWork:
    """What a model of Llama's shape costs, whose MLPs may be mixtures of experts.

    Attributes:
        token_flop: products of one token, without logits.
        logits_flop: logits of one row.
        pair_flop: attention of one token to one token, over all layers.
        weight_bytes: weights that every step reads.
        kv_bytes: keys and values of one token.
        expert_bytes: weights of an expert of each layer.
        experts, chosen: how many there are in a layer, and of these how many a token chooses.
    """

    token_flop: float
    logits_flop: float
    pair_flop: float
    weight_bytes: float
    kv_bytes: float
    expert_bytes: float = 0
    experts: int = 0
    chosen: int = 0

    def step_bytes(self, tokens: int) -> float:
        """Weights that a step of so many tokens reads, if they choose experts at random."""
        if not self.experts:
            return self.weight_bytes
        used = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        return self.weight_bytes + used * self.expert_bytes

    @classmethod
    def of(cls, folder: Path) -> ModelWork:
        """From the config.json in a folder."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        layers, width = config["num_hidden_layers"], config["hidden_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or width // heads
        attention = width * head_dim * 2 * (heads + kv_heads)
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        size = config.get("moe_intermediate_size") or config["intermediate_size"]
        chosen = config["num_experts_per_tok"] if experts else 0
        expert = layers * 3 * width * size
        weights = layers * (attention + width * experts) + (0 if experts else expert)
        vocabulary = width * config["vocab_size"]
        return cls(
            token_flop=2 * (weights + chosen * expert),
            logits_flop=2 * vocabulary,
            pair_flop=4 * heads * head_dim * layers,
            weight_bytes=BYTES_PER_NUMBER * (weights + vocabulary),
            kv_bytes=2 * kv_heads * head_dim * layers * BYTES_PER_NUMBER,
            expert_bytes=BYTES_PER_NUMBER * expert if experts else 0,
            experts=experts,
            chosen=chosen,
        )


def floor_seconds(model: ModelWork, ceilings: Ceilings, requests: Iterable[Request]) -> float:
    """The least time for requests that all run at once."""
    requests = list(requests)
    prefill = sum(_prefill_flop(model, request) for request in requests)
    decoded = [request.outputs - 1 for request in requests]
    products = sum(decoded) * (model.token_flop + model.logits_flop) / ceilings.flop_per_second
    weights = max(decoded) * model.step_bytes(len(requests)) / ceilings.bytes_per_second
    kept = sum(_decode_pairs(request) for request in requests) * model.kv_bytes
    return (
        prefill / ceilings.flop_per_second
        + max(products, weights)
        + kept / ceilings.bytes_per_second
    )


def _prefill_flop(model: ModelWork, request: Request) -> float:
    computed = request.prompt - request.cached
    if computed == 0:
        return 0.0
    pairs = (request.prompt**2 - request.cached**2) / 2
    return computed * model.token_flop + model.logits_flop + pairs * model.pair_flop


def _decode_pairs(request: Request) -> float:
    """Tokens in pages that the decode steps read from memory, each step counted.

    Shared ones count for one request alone: of a layer, the card's cache can hold them for others.
    """
    steps = request.outputs - 1
    return steps * (request.prompt - request.shared + (steps + 1) / 2)
