"""Mixtures of experts to measure: their sizes, random weights, and whether answers are exact."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import DTYPE, random
from paged.cache import DROPPED
from paged.matmul import Groups, Tiling, grouped_matmul
from paged.matmul.estimate import grouped_tilings
from paged.matmul.tuned import GroupedProduct
from paged.models.activations import ClampedSwiglu
from paged.models.experts import Activation, HopperExperts, Mixture, Routing, mix
from paged.models.weights import Dense

# Threads that compile.
THREADS = 12
# Far from the exact result, relative to its norm: bfloat16 rounds to 2e-3 of it, each time.
ERROR = 1e-2


@dataclass(frozen=True)
class Sizes:
    """A model's mixtures.

    Attributes:
        experts, chosen: how many there are, and of these how many a token chooses.
        hidden, inner: D, and F of each expert.
        activation: of the experts.
        bias: they have biases.
    """

    experts: int
    chosen: int
    hidden: int
    inner: int
    activation: Activation = "silu"
    bias: bool = False

    @property
    def routing(self) -> Routing:
        """How tokens choose."""
        return Routing(self.experts, self.chosen, self.inner, renormalise=True)

    @property
    def fused(self) -> bool:
        """The kernel applies the activation."""
        return self.activation == "silu" and not self.bias

    @property
    def products(self) -> dict[str, GroupedProduct]:
        """The products of an expert: (gated, X, K, N)."""
        inner = self.inner if self.fused else 2 * self.inner
        return {
            "gate_up": (self.fused, self.experts, self.hidden, inner),
            "down": (False, self.experts, self.inner, self.hidden),
        }


MODELS = {
    "mixtral-8x7b": Sizes(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768),
    "gpt-oss-20b": Sizes(32, 4, 2880, 2880, ClampedSwiglu(1.702, 7.0), bias=True),
    "qwen1.5-moe-a2.7b": Sizes(60, 4, 2048, 1408),
}


def layer_weights(sizes: Sizes, seed: int) -> Mixture:
    """Random weights of a layer."""
    x, d, f = sizes.experts, sizes.hidden, sizes.inner
    kind = jax.devices()[0].device_kind
    inner, outer = (random(seed + 3, (x, 2, f)), random(seed + 4, (x, d)))
    return Mixture(
        router=Dense(random(seed, (d, x), 1 / d)),
        gate_up=HopperExperts(
            random(seed + 1, (x, d, 2, f), 1 / d), inner if sizes.bias else None, device_kind=kind
        ),
        down=HopperExperts(
            random(seed + 2, (x, f, d), 1 / f), outer if sizes.bias else None, device_kind=kind
        ),
    )


def check() -> None:
    """Say how far all sorts of products, and whole mixtures, are from exact results."""
    cases: list[Any] = [
        functools.partial(product_error, sizes, gated, tiling)
        for sizes in ([8, 0, 16, 64, 0, 200], [0, 0, 8], [0, 264, 0], [72] * 8, [0] * 4)
        for gated in (False, True)
        for tiling in tilings_to_check(gated)
    ]
    clamped = ClampedSwiglu(1.702, 7.0)
    cases += [
        functools.partial(mixture_error, sizes, tokens)
        for sizes in (Sizes(16, 4, 512, 448), Sizes(8, 2, 320, 192, clamped, bias=True))
        for tokens in (1, 13, 120, 600, 2000)
    ]
    start = time.monotonic()
    with ThreadPoolExecutor(THREADS) as threads:
        errors = list(threads.map(lambda case: case(), cases))
    for case, found in zip(cases, errors, strict=True):
        if not found < ERROR:
            print(f"WRONG by {found:.1e}: {case.func.__name__} {case.args}", flush=True)
    seconds = time.monotonic() - start
    print(f"{len(cases)} checks: worst error {max(errors):.1e}, in {seconds:.0f} s", flush=True)


def tilings_to_check(gated: bool) -> list[Tiling]:
    """Of each sort one."""
    few, many = (grouped_tilings(m, 1, 512, 448, gated=gated) for m in (8, 512))
    return [few[0], few[-1], *many[:3], *([] if gated else [Tiling(widths=(64,), splits=2)])]


def product_error(sizes: Sequence[int], gated: bool, tiling: Tiling) -> float:
    """Of one product in groups of these sizes, relative to the norm of the exact one."""
    k, n, rows = 512, 448, sum(sizes)
    rng = np.random.default_rng(rows)
    shape = (len(sizes), k, 2, n) if gated else (len(sizes), k, n)
    x = jnp.asarray(rng.normal(size=(rows + 16, k)), DTYPE)
    w = jnp.asarray(rng.normal(size=shape) / k**0.5, DTYPE)
    groups = Groups.of(jnp.asarray(sizes, jnp.int32), max(8, *sizes))
    found = jax.jit(functools.partial(grouped_matmul, tiling=tiling))(x, w, groups)
    wide = np.asarray(x, np.float64), np.asarray(w, np.float64)
    ends = np.cumsum(sizes)
    parts = [
        np.tensordot(wide[0][end - size : end], weight, 1)
        for size, end, weight in zip(sizes, ends, wide[1], strict=True)
    ]
    exact = np.concatenate(parts)
    if gated:
        exact = exact[:, 0] / (1 + np.exp(-exact[:, 0])) * exact[:, 1]
    difference = np.linalg.norm(np.asarray(found, np.float64)[:rows] - exact)
    return float(difference / max(np.linalg.norm(exact), 1e-9))


def mixture_error(sizes: Sizes, tokens: int) -> float:
    """Of a mixture, relative to the norm of the exact one, of which some tokens are padding."""
    params, padding = layer_weights(sizes, tokens), tokens // 4
    x = random(tokens, (tokens, sizes.hidden))
    meta: Any = SimpleNamespace(write_index=jnp.arange(tokens).at[tokens - padding :].set(DROPPED))
    routing = sizes.routing
    found = jax.jit(lambda params, x: mix(params, routing, x, meta, sizes.activation))(params, x)
    shares, chosen = routing.choose(params.router(x, jnp.dtype(jnp.float32)))
    weights: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    exact = np.zeros((tokens, sizes.hidden))
    for token in range(tokens - padding):
        for share, expert in zip(np.asarray(shares[token]), np.asarray(chosen[token]), strict=True):
            row = np.asarray(x[token], np.float64)
            answer = exact_answer(weights, int(expert), row, sizes)
            exact[token] += float(share) * answer
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


def exact_answer(weights: Any, expert: int, row: np.ndarray, sizes: Sizes) -> np.ndarray:
    """What an expert makes of a row, in float64."""
    both = np.tensordot(row, weights.gate_up.kernel[expert], 1)
    both = both + weights.gate_up.bias[expert] if sizes.bias else both
    gate, up = both
    if isinstance(sizes.activation, ClampedSwiglu):
        alpha, limit = sizes.activation.alpha, sizes.activation.limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
        inner = gate / (1 + np.exp(-alpha * gate)) * up
    else:
        inner = gate / (1 + np.exp(-gate)) * up
    answer = inner @ weights.down.kernel[expert]
    return answer + weights.down.bias[expert] if sizes.bias else answer
