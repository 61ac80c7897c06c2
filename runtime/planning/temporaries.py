"""What steps need of the memory beside weights, state and pages: estimated, not compiled.

An engine compiles its largest programs and asks XLA. What XLA answered for an H200 follows from a
few arrays, and is told from their sizes here: sampling holds the logits of all rows, or those of a
group of rows three times; the widest of a layer's activations are held together with the residual
stream.
"""

from __future__ import annotations

import jax.numpy as jnp

from paged.matmul.groups import num_places
from paged.runtime.division import DEVICE_RESERVE
from paged.runtime.planning.work import routing_of
from paged.runtime.steps import SAMPLE_ROWS, StepShapes

_ADJUSTED = 3
_STREAMS = 3
_FLOAT32 = 4
# Outputs of as many steps can be in flight.
_IN_FLIGHT = 2
# Rows of experts are filled up to multiples of so many.
_ROWS = 8


def step_memory_estimate(shapes: StepShapes, dtype: jnp.dtype, *, is_hopper: bool) -> int:
    """Bytes for steps of each device, the reserve included.

    Args:
        is_hopper: whether gate and up projection of an MLP are multiplied in one kernel.
    """
    tokens, rows = shapes.buckets.mixed[-1], shapes.buckets.sampling[-1]
    width = shapes.model.hidden_size * dtype.itemsize
    logits = max(rows, _ADJUSTED * min(rows, SAMPLE_ROWS)) * shapes.model.vocab_size * _FLOAT32
    activations = tokens * (_STREAMS * width + _mlp_bytes(shapes, dtype, is_hopper=is_hopper))
    experts = _expert_bytes(shapes, tokens, dtype)
    outputs = (tokens + rows) * width
    return max(logits, activations, experts) + _IN_FLIGHT * outputs + DEVICE_RESERVE


def _mlp_bytes(shapes: StepShapes, dtype: jnp.dtype, *, is_hopper: bool) -> int:
    """Of a token, inside of an MLP, of which each device has a share."""
    arrays = 1 if is_hopper else 3
    size = arrays * shapes.model.intermediate_size * dtype.itemsize
    return size // shapes.placement.num_devices


def _expert_bytes(shapes: StepShapes, tokens: int, dtype: jnp.dtype) -> int:
    """Of all tokens while experts answer; 0 without experts."""
    routing = routing_of(shapes.model)
    if routing is None:
        return 0
    places = num_places(tokens * routing.num_chosen, routing.num_experts, _ROWS)
    width = shapes.model.hidden_size
    return dtype.itemsize * (
        places * (width + max(width, routing.expert_size)) + 2 * tokens * width
    )
