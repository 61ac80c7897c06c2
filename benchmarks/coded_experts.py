"""Time the experts of gpt-oss in MXFP4 on this GPU: by the kernel, expanded, and in 16 bits.

Both products of a layer's mixture, for rows in groups of random experts, in several layers in a row
whose weights come from memory. By the GPU's own clock (CUPTI), medians; first the kernel's products
are checked against those of the weights that are meant.

    python benchmarks/coded_experts.py --tokens 1 8 32 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import DTYPE, difference, gpu_arguments, median_microseconds, repeated
from paged.matmul import Order
from paged.models.activations import ClampedSwiglu
from paged.models.quantized import E2M1, GroupCoded
from paged.models.scaled_experts import HopperScaledExperts

HIDDEN_SIZE, EXPERT_SIZE, CHOSEN = 2880, 2880, 4
ACTIVATION = ClampedSwiglu(1.702, 7.0)
LAYERS = 4
Pair = tuple[Any, Any]


def coded(seed: int, experts: int, inputs: int, *outputs: int) -> HopperScaledExperts:
    """Random weights of experts in MXFP4."""
    bits = jax.random.bits(jax.random.key(seed), (experts, inputs // 2, *outputs), jnp.uint8)
    scale = jnp.full((experts, inputs // 32, *outputs), 120, jnp.uint8)
    kind = jax.devices()[0].device_kind
    return HopperScaledExperts(GroupCoded(bits, scale, codes=E2M1), device_kind=kind)


def layer(seed: int, experts: int) -> Pair:
    """Both weights of a mixture."""
    return (
        coded(seed, experts, HIDDEN_SIZE, 2, EXPERT_SIZE),
        coded(seed + 1, experts, EXPERT_SIZE, HIDDEN_SIZE),
    )


def expanded(weights: Pair) -> Pair:
    """The same in 16 bits."""
    first, second = weights
    return first._expanded(DTYPE), second._expanded(DTYPE)


def answers(layers: Sequence[Pair], x: jax.Array, order: Order) -> jax.Array:
    """x [R, D] through the experts of all layers, one after the other."""
    for gate_up, down in layers:
        x = down(gate_up.gated(x, order.groups, ACTIVATION), order.groups)
    return x


def microseconds(run: Callable[..., jax.Array], *args: Any) -> tuple[float, jax.Array]:
    """Of a layer, and what all of them answer."""
    out, runs = repeated(jax.jit(run), *args)
    return median_microseconds(runs) / LAYERS, out


def compare(tokens: int, layers: Sequence[Pair], plain: Sequence[Pair], experts: int) -> str:
    """A row of the table."""
    owners = np.random.default_rng(tokens).permuted(
        np.tile(np.arange(experts), (tokens, 1)), axis=1
    )[:, :CHOSEN]
    given = jnp.asarray(owners.reshape(-1), jnp.int32)
    order = jax.jit(lambda owners: layers[0][0].in_groups(owners, tokens))(given)
    x = jax.random.normal(jax.random.key(tokens), (len(order.rows), HIDDEN_SIZE), DTYPE)
    by_kernel, found = microseconds(answers, layers, x, order)
    widened, _ = microseconds(
        lambda each, x, order: answers([expanded(pair) for pair in each], x, order),
        *(layers, x, order),
    )
    wide, expected = microseconds(answers, plain, x, order)
    error = float(difference(found[order.places], expected[order.places]))
    return f"| {tokens} | {by_kernel:.0f} | {widened:.0f} | {wide:.0f} | {error:.4f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--experts", type=int, default=32)
    options = gpu_arguments(parser)
    layers = [layer(2 * index, options.experts) for index in range(LAYERS)]
    plain = [jax.jit(expanded)(each) for each in layers]
    print("| tokens | kernel, us | expanded each time, us | 16 bits, us | difference |")
    print("| --- | --- | --- | --- | --- |")
    for tokens in options.tokens:
        print(compare(tokens, layers, plain, options.experts), flush=True)


if __name__ == "__main__":
    main()
