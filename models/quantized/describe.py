"""From the description of a model in full precision to that of its quantised form."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paged import matmul
from paged.errors import ConfigError
from paged.models.quantized.channels import FLOAT8, ChannelScaled, TileScaled
from paged.models.quantized.expanding import QUANTIZED, expanded_on_load
from paged.models.quantized.ggml import GgmlTensors
from paged.models.quantized.groups import GroupScaled
from paged.models.quantized.joined import Joined, split
from paged.models.quantized.rules import Quantization, modules_of
from paged.models.quantized.shifted import GroupShifted, ShiftedEmbedding
from paged.models.weights import Dense, Embedding, ParamSpec, Portable, for_device, param_bytes

_FLOAT8_CAPABILITY = 8.9


def quantized(specs: Any, quantization: Quantization | None) -> Any:
    """The same parameters, with projections stored as `quantization` says; None leaves them.

    Norms are always in full precision, and embeddings but for those of GGUF files. What is
    described as quantised already stays.

    Raises:
        ConfigError: a checkpoint has a projection stored in a way that does not go here.
    """
    if quantization is None:
        return specs

    def stored(node: Any) -> Any:
        if isinstance(node, Dense):
            return _projection(node, quantization)
        if isinstance(node, Embedding):
            return _embedding(node, quantization)
        if isinstance(node, ParamSpec) and not quantization.made_on_load:
            return _expanded(node, quantization)
        return node

    whole = Dense | Embedding | QUANTIZED
    return jax.tree.map(stored, specs, is_leaf=lambda node: isinstance(node, whole))


def _projection(weight: Dense, quantization: Quantization) -> Any:
    """A plain projection as it is stored: whole, or what of it is stored alike together."""
    kernel: Any = weight.kernel
    weights = [
        each if scheme is None else scheme.describe(each)
        for scheme, each in split(weight, quantization.schemes(modules_of(weight)))
    ]
    return weights[0] if len(weights) == 1 else Joined(tuple(weights), 1 + kernel.join_axis)


def _embedding(embedding: Embedding, quantization: Quantization) -> Any:
    """An embedding as it is stored; it is looked up in, so that not every scheme goes."""
    table: Any = embedding.table
    scheme = quantization.scheme(table.parts[0].name.removesuffix(".weight"))
    return scheme.describe_embedding(embedding) if isinstance(scheme, GgmlTensors) else embedding


def _expanded(spec: ParamSpec, quantization: Quantization) -> ParamSpec:
    """A matrix that is no projection here, from what the checkpoint may have quantised."""
    matrices = [part.name for part in spec.parts if len(part.shape) > 1]
    modules = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
    scheme = quantization.scheme(modules[0]) if modules else None
    if scheme is None or isinstance(scheme, GgmlTensors):  # which files expand by themselves
        return spec
    made = expanded_on_load(spec, scheme)
    if made is None:
        raise ConfigError(
            f"the checkpoint has {modules[0]!r} quantized by {quantization.name}, and this is "
            "supported in full precision alone; use an unquantized checkpoint"
        )
    return made


class WeightBytes(NamedTuple):
    """Where the bytes of a model's weights are.

    Attributes:
        quantized: in quantised projections and experts, their scales and biases.
        experts: in experts that are in full precision.
        plain: in all else.
    """

    quantized: int
    experts: int
    plain: int


def weight_bytes(specs: Any, dtype: jnp.dtype) -> WeightBytes:
    """Bytes of the described parameters, those in full precision being in `dtype`."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, Portable))
    nodes = [node for node in leaves if isinstance(node, Portable)]
    quantised = [node for node in nodes if node.in_few_bits]
    experts = [node for node in nodes if not node.in_few_bits and not isinstance(node, Dense)]
    first, second = param_bytes(quantised, dtype), param_bytes(experts, dtype)
    return WeightBytes(first, second, param_bytes(specs, dtype) - first - second)


def expanded_weights(params: Any, device: jax.Device) -> list[str]:
    """What a GPU does to quantised weights at each product that it could do without, and why.

    `params` are a model's, or their shapes.
    """
    shapes = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding), params
    )
    whole = QUANTIZED | ShiftedEmbedding
    leaves = jax.tree.leaves(
        for_device(shapes, device), is_leaf=lambda node: isinstance(node, whole)
    )
    nodes = [node for node in leaves if isinstance(node, QUANTIZED)]
    said = []
    bits = {node.bits for node in nodes if isinstance(node, GroupScaled | GroupShifted)}
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
