"""From the description of a model in full precision to that of its quantised form."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paged import matmul
from paged.errors import ConfigError
from paged.models.quantized.channels import FLOAT8, ChannelScaled, TileScaled
from paged.models.quantized.groups import GroupScaled
from paged.models.quantized.rules import Quantization, modules_of
from paged.models.weights import Dense, Embedding, ParamSpec, Portable, for_device, param_bytes

_FLOAT8_CAPABILITY = 8.9
QUANTIZED = ChannelScaled | TileScaled | GroupScaled


def quantized(specs: Any, quantization: Quantization | None) -> Any:
    """The same parameters, with projections stored as `quantization` says; None leaves them.

    Embeddings, norms and experts are always in full precision.

    Raises:
        ConfigError: a checkpoint has a projection stored in a way that does not go here.
    """
    if quantization is None:
        return specs

    def stored(node: Any) -> Any:
        if isinstance(node, Dense):
            scheme = quantization.scheme_for(modules_of(node))
            return node if scheme is None else scheme.describe(node)
        if isinstance(node, ParamSpec) and not quantization.made_on_load:
            _check_plain(node, quantization)
        return node

    return jax.tree.map(stored, specs, is_leaf=lambda node: isinstance(node, Dense | Embedding))


def _check_plain(spec: ParamSpec, quantization: Quantization) -> None:
    """Refuse a matrix that is no projection here, and quantised in the checkpoint."""
    matrices = [part.name for part in spec.parts if len(part.shape) > 1]
    modules = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
    if modules and quantization.scheme_for(modules[:1]) is not None:
        raise ConfigError(
            f"the checkpoint has {modules[0]!r} quantized by {quantization.name}, and experts and "
            "the attention of DeepSeek are supported in full precision alone; use an unquantized "
            "checkpoint (--quantization then takes the other weights)"
        )


class WeightBytes(NamedTuple):
    """Where the bytes of a model's weights are.

    Attributes:
        quantized: in quantised projections, their scales and biases.
        experts: in experts, which are in full precision.
        plain: in all else.
    """

    quantized: int
    experts: int
    plain: int


def weight_bytes(specs: Any, dtype: jnp.dtype) -> WeightBytes:
    """Bytes of the described parameters, those in full precision being in `dtype`."""
    nodes = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, Portable))
    quantised = [node for node in nodes if isinstance(node, QUANTIZED)]
    experts = [n for n in nodes if isinstance(n, Portable) and not isinstance(n, QUANTIZED | Dense)]
    first, second = param_bytes(quantised, dtype), param_bytes(experts, dtype)
    return WeightBytes(first, second, param_bytes(specs, dtype) - first - second)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QUANTIZED)


def expanded_weights(params: Any, device: jax.Device) -> list[str]:
    """What a GPU does to quantised weights at each product that it could do without, and why.

    `params` are a model's, or their shapes.
    """
    shapes = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding), params
    )
    leaves = jax.tree.leaves(for_device(shapes, device), is_leaf=_is_quantized)
    nodes = [node for node in leaves if _is_quantized(node)]
    said = []
    bits = {node.bits for node in nodes if isinstance(node, GroupScaled)}
    wanted = (
        "takes weights of one device, whose inputs are a multiple of 128 and outputs of 64, in "
        "groups of 32, 64 or 128"
        if matmul.available(device)
        else "needs a Hopper GPU, of compute capability 9.0"
    )
    if 4 in bits:
        said.append(
            f"weights of 4 bits in groups are expanded at each product: our kernel {wanted}"
        )
    if 8 in bits:
        said.append("weights of 8 bits in groups are expanded at each product: no kernel is theirs")
    if any(isinstance(node, TileScaled) for node in nodes):
        said.append(f"fp8 weights in tiles are expanded at each product: our kernel {wanted}")
    capability = float(getattr(device, "compute_capability", 0))
    floats = any(isinstance(n, ChannelScaled) and n.weight.dtype == FLOAT8 for n in nodes)
    if floats and capability < _FLOAT8_CAPABILITY:
        said.append(
            f"fp8 weights are expanded at each product: products of 8 bits need a GPU of compute "
            f"capability {_FLOAT8_CAPABILITY} or above (--quantization int8 does not)"
        )
    return said
