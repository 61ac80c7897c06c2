"""Which attention backend an engine runs, and what of its steps is not done the fastest way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from paged import matmul
from paged.attention import default_backend, left_to_others
from paged.cache import Pages
from paged.models.experts import slower_products
from paged.models.quantized import expanded_weights
from paged.runtime.errors import ConfigError
from paged.runtime.steps import StepShapes

_NEEDS = {
    "triton": "an NVIDIA GPU of compute capability 8.0 or above",
    "mosaic": "a Hopper GPU, of compute capability 9.0",
}


def choose_backend(wanted: str, device: jax.Device) -> str:
    """The backend by the name of a flag; "auto" is the fastest on `device`.

    Raises:
        ConfigError: the device cannot run it.
    """
    best = default_backend(device)
    if wanted == "auto":
        return best
    if wanted in ("xla", best) or (wanted, best) == ("triton", "mosaic"):
        return wanted
    raise ConfigError(
        f"--attention-backend {wanted} needs {_NEEDS[wanted]}, and this is {_name(device)}. "
        f"Use {best}, which auto chooses here."
    )


def slower_paths(
    shapes: StepShapes, dtype: jnp.dtype, device: jax.Device, params: Any
) -> list[str]:
    """What of the steps of a model in `dtype` a GPU could do faster, and why it does not.

    `params` are the shapes of the weights that it has.
    """
    if device.platform == "cpu":
        return []
    q = jax.ShapeDtypeStruct((1, shapes.model.num_heads, shapes.model.head_dim), dtype)
    pages = jax.eval_shape(lambda: Pages.zeros(shapes.cache))
    paths = _asked_for(shapes.backend, device) + left_to_others(shapes.backend, q, pages)
    if matmul.available(device) and dtype.itemsize != 2:
        paths.append(f"weights are multiplied by XLA: our kernel takes 16-bit floats, not {dtype}")
    return paths + slower_products(params, device) + expanded_weights(params, device)


def _asked_for(backend: str, device: jax.Device) -> list[str]:
    best = default_backend(device)
    if backend != best:
        return [f"attention runs by {backend}, as --attention-backend asks, not by {best}"]
    if backend == "xla":
        return [f"attention runs by xla: our kernels need {_NEEDS['triton']}"]
    return []


def _name(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    return "a CPU" if capability is None else f"{device.device_kind}, of {capability}"
