"""Weights in host memory: which layers' they are, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from paged.models.offloading import NUM_COPIES, choose_layers, freed
from paged.models.weights import param_bytes
from paged.runtime.errors import ConfigError
from paged.runtime.memory import size_text

_GIB = 2**30


def layers_on_host(
    gib: float, layers: Sequence[Any], dtype: jnp.dtype, available: int | None
) -> frozenset[int]:
    """The layers whose weights go to the host for --cpu-offload-gb to be free on the device.

    Args:
        layers: descriptions of their weights, which are held in `dtype`.
        available: bytes of host memory; None where it is not known.

    Raises:
        ConfigError: all layers free less, or the host has no room for them.
    """
    wanted = int(gib * _GIB)
    if not wanted:
        return frozenset()
    sizes = [param_bytes(layer, dtype) for layer in layers]
    chosen = choose_layers(sizes, wanted)
    if (most := freed(sizes, chosen)) < wanted:
        raise ConfigError(
            f"--cpu-offload-gb is {size_text(wanted)}, and at most {size_text(most)} can leave the "
            f"device: its {len(sizes)} layers take {size_text(sum(sizes))}, of which a step holds "
            f"{NUM_COPIES} at a time. Use at most {int(100 * most / _GIB) / 100:.2f}."
        )
    needed = sum(sizes[index] for index in chosen)
    if available is not None and needed > available:
        raise ConfigError(
            f"--cpu-offload-gb {gib:g} puts {len(chosen)} layers of {size_text(needed)} into host "
            f"memory, and this machine has {size_text(available)} of it left. Give less."
        )
    return chosen


def cost_report(num_layers: int, of_layers: int, num_bytes: int, seconds: float) -> str:
    """A line for the start-up log: what a step costs that copies so many bytes from the host.

    Args:
        num_layers, of_layers: those on the host, and all.
        seconds: that a step of one sequence's next token took, as measured.
    """
    return (
        f"The weights of {num_layers} of {of_layers} layers ({size_text(num_bytes)}) are in host "
        f"memory and are copied in each step, at {num_bytes / seconds / 1e9:.1f} GB/s. A step "
        f"takes at least {1e3 * seconds:.1f} ms: expect {1 / seconds:.1f} tokens/s of a sequence, "
        "or less"
    )
