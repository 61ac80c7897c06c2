"""The weight seam: what a parameter is, where it comes from, and how a weight multiplies.

A family describes its parameters once, as a pytree of `ParamSpec` in the shape of its parameters.
Initialising, loading, sharding and the memory estimate all come from that description. A weight is
a pytree that knows how to multiply (`Linear`); models never ask how it is stored.

Axis letters used on this floor: T flat tokens, K inputs and N outputs of a weight, V vocabulary,
D size of the residual stream, Hq query heads, Hkv key/value heads, G = Hq / Hkv, E head size,
F size of the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from paged import matmul
from paged.models.activations import gate
from paged.models.mesh import TENSOR

Init = Literal["normal", "ones", "zeros"]
_DEVIATION = 0.02  # of random weights

PINNED = "pinned_host"
"""Host memory that devices copy from and to by themselves, as JAX calls it."""

# Logical axis -> mesh axis. Axes that are absent, like the residual stream, are replicated.
SHARDING_RULES = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "key_heads": TENSOR,  # of what belongs to keys alone
    "mlp": TENSOR,
    "shared_mlp": TENSOR,  # of experts that stand beside a mixture, with which they are summed
    "experts": TENSOR,
}


class Linear(Protocol):
    """A weight that multiplies, and does what follows in the same go where that is faster."""

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """x [T, K] to [T, *N], in x's dtype unless another is asked for."""
        ...

    def added_to(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        """`residual` [T, N] plus the product of x [T, K]."""
        ...

    def gated(self, x: jax.Array, activation: str) -> jax.Array:
        """activation(gate) * up [T, F] of x [T, K], for a weight of [K, 2, F]: first gate, then up.

        `activation` is one of `ACTIVATIONS`.
        """
        ...


class Unfused:
    """A `Linear` for which the product and what follows it are two operations."""

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """See `Linear`."""
        raise NotImplementedError

    def added_to(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        """See `Linear`."""
        return residual + self(x)

    def gated(self, x: jax.Array, activation: str) -> jax.Array:
        """See `Linear`."""
        return gate(self(x), activation)


class Portable:
    """Weights of a type that runs everywhere, of which another may be faster somewhere.

    Attributes:
        in_few_bits: they are quantised.
    """

    in_few_bits: ClassVar[bool] = False

    def on_hopper(self, device_kind: str) -> Portable:
        """The same weights, of the type that multiplies fastest on a Hopper GPU of a kind."""
        raise NotImplementedError


@struct.dataclass
class Dense(Unfused, Portable):
    """A plain weight.

    Attributes:
        kernel: [K, *N]; several output axes keep fused projections apart, and let each be sharded
            by whole heads.
        bias: [*N] or None.
    """

    kernel: jax.Array
    bias: jax.Array | None = None

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        out = jnp.tensordot(x, self.kernel, axes=1, preferred_element_type=dtype)
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def on_hopper(self, device_kind: str) -> Dense:
        """See `Portable`."""
        return HopperDense(self.kernel, self.bias, device_kind=device_kind)


@struct.dataclass
class HopperDense(Dense):
    """A plain weight on a Hopper GPU: multiplied by a kernel of ours where XLA is slower.

    Attributes:
        device_kind: JAX's name of the GPU, by which the kernel is tuned (static).
    """

    device_kind: str = struct.field(pytree_node=False, kw_only=True)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        kernel = self.kernel.reshape(self.kernel.shape[0], -1)
        tiling = self._tiling(x, kernel)
        if tiling is None:
            return Dense.__call__(self, x, dtype)
        out = matmul.matmul(x, kernel, tiling, out_dtype=dtype)
        out = out.reshape(x.shape[0], *self.kernel.shape[1:])
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def added_to(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        tiling = self._tiling(x, self.kernel, residual=True)
        if tiling is None or self.bias is not None:
            return Dense.added_to(self, residual, x)
        return matmul.matmul(x, self.kernel, tiling, residual=residual)

    def gated(self, x: jax.Array, activation: str) -> jax.Array:
        tiling = self._tiling(x, self.kernel) if activation == "silu" else None
        if tiling is None or self.bias is not None:
            return Dense.gated(self, x, activation)
        return matmul.matmul(x, self.kernel, tiling)

    def _tiling(
        self, x: jax.Array, kernel: jax.Array, *, residual: bool = False
    ) -> matmul.Tiling | None:
        """How our kernel is to cut x [T, K] times [K, N] or [K, 2, F]; None to leave it to XLA."""
        if not matmul.supports(x, kernel):
            return None
        (rows, inputs), outputs = x.shape, kernel.shape[-1]
        return matmul.tiling_for(
            rows,
            inputs,
            outputs,
            device_kind=self.device_kind,
            gated=kernel.ndim == 3,
            residual=residual,
        )


@struct.dataclass
class Embedding:
    """A vector for each token; tied models also multiply by it to get logits.

    Attributes:
        table: [V, D].
    """

    table: jax.Array

    @property
    def dtype(self) -> jnp.dtype:
        """Of the vectors."""
        return self.table.dtype

    def lookup(self, tokens: jax.Array) -> jax.Array:
        """[T] int32 to [T, D]. Ids beyond the table are clipped: only padding may have them."""
        return jnp.take(self.table, tokens, axis=0, mode="clip")

    def unembed(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """x [T, D] to [T, V] in `dtype`, reading the table as it lies (no transposed copy)."""
        contract_last = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, self.table, contract_last, preferred_element_type=dtype)


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor that goes into a parameter.

    Attributes:
        name: in the checkpoint.
        shape: in the checkpoint.
        view: shape it takes, without moving elements, before the parts are joined.
        first_row: where along the first axis the part begins; it ends when the view is full.
        dtype: what it must be in the checkpoint; None for any float of 16 bits or more.
        any_shape: the checkpoint may have as many elements in another shape.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    first_row: int = 0
    dtype: np.dtype | None = None
    any_shape: bool = False

    def takes(self, dtype: np.dtype) -> bool:
        """Whether the checkpoint tensor may have this dtype."""
        if self.dtype is not None:
            return dtype == self.dtype
        return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the checkpoint tensor may have this shape."""
        same_size = self.any_shape and math.prod(shape) == math.prod(self.shape)
        return same_size or shape == self.shape

    def cut(self, tensor: np.ndarray) -> np.ndarray:
        """The rows of the checkpoint tensor that are this part's."""
        rows = math.prod(self.view) // math.prod(self.shape[1:])
        return tensor.reshape(self.shape)[self.first_row : self.first_row + rows]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, without its memory.

    Attributes:
        parts: the checkpoint tensors it is made of.
        shape: of the parameter.
        axes: logical name of each axis, or None; see `SHARDING_RULES`.
        init: how a random model starts.
        join_axis: along which the views of the parts are joined.
        transpose: the joined tensor has its inputs last (as Hugging Face checkpoints do) and the
            parameter has them first.
        dtype: of its own, whatever the others are cast to; None for theirs.
        on_host: whether it lives in pinned host memory; see `paged.models.offloading`.
    """

    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    join_axis: int = 0
    transpose: bool = False
    dtype: jnp.dtype | None = None
    on_host: bool = False

    def dtype_among(self, others: jnp.dtype) -> jnp.dtype:
        """What it is held in where the others are held in `others`."""
        return self.dtype or jnp.dtype(others)

    def bytes_to_make(self, dtype: jnp.dtype) -> int:
        """Bytes that making it takes where the others are held in `dtype`."""
        return param_bytes(self, dtype)

    def anonymous(self) -> Self:
        """The same for all parameters of a make: without the names of its parts."""
        parts = tuple(replace(part, name="") for part in self.parts)
        return replace(self, parts=parts, on_host=False)

    def at_home(self, param: jax.Array) -> jax.Array:
        """The parameter, made on the device, where it lives; it has arrived when this returns."""
        if not self.on_host:
            return param
        return jax.device_put(param, param.sharding.with_memory_kind(PINNED)).block_until_ready()

    def stored(self, name: str) -> ParamSpec:
        """How a file describes it that holds it as it is, under its place in a description."""
        part = Part(name, self.shape, self.shape, dtype=self.dtype)
        return ParamSpec((part,), self.shape, self.axes, self.init, dtype=self.dtype)

    def random(self, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """How a random model starts: drawn from N(0, 0.02), or constant, as `init` says."""
        if self.init == "normal":
            return _DEVIATION * jax.random.normal(key, self.shape, dtype)
        return jnp.full(self.shape, 1 if self.init == "ones" else 0, dtype)

    def flaw(self, param: jax.Array) -> str | None:
        """What is wrong with the values that it was loaded with, if anything is."""
        return None

    def sharding_on(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        """How it lies on the devices of `mesh`, of which each has all that goes into no shares."""
        rules = [
            SHARDING_RULES.get(axis) if axis and size % mesh.size == 0 else None
            for axis, size in zip(self.axes, self.shape, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*rules))

    def spread(self, sharding: Any) -> tuple[Any, ...]:
        """Where the view of each part goes, for a device to get what it needs of it alone.

        A kind of parameter that assembles itself in another way says this in another way, too.

        Args:
            sharding: of the parameter; what is no `NamedSharding` goes for the parts, too.
        """
        if not isinstance(sharding, NamedSharding):
            return (sharding,) * len(self.parts)
        axes = [*sharding.spec, *[None] * (len(self.shape) - len(sharding.spec))]
        if self.transpose:
            axes = [*axes[1:], axes[0]]
        if len(self.parts) > 1:
            axes[self.join_axis] = None  # a device's share begins and ends anywhere in the parts
        return (NamedSharding(sharding.mesh, PartitionSpec(*axes)),) * len(self.parts)

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """Make the parameter, in `dtype`, of what its `parts`, in their order, cut of tensors."""
        views = [
            tensor.reshape(part.view).astype(dtype)
            for tensor, part in zip(tensors, self.parts, strict=True)
        ]
        joined = jnp.concatenate(views, axis=self.join_axis) if len(views) > 1 else views[0]
        return jnp.moveaxis(joined, -1, 0) if self.transpose else jnp.copy(joined)


def vector(name: str, size: int, init: Init, axis: str | None = None) -> ParamSpec:
    """A parameter of one axis, which every device holds whole unless the axis has a name."""
    return ParamSpec((Part(name, (size,), (size,)),), (size,), (axis,), init)


def embedding(name: str, vocab_size: int, hidden_size: int) -> Embedding:
    """Description of a token embedding stored as `name` [V, D]."""
    shape = (vocab_size, hidden_size)
    spec: Any = ParamSpec((Part(name, shape, shape),), shape, ("vocab", None), "normal")
    return Embedding(spec)


def linear(
    name: str,
    inputs: int,
    outputs: int,
    *,
    bias: bool = False,
    axes: tuple[str | None, str | None] = (None, None),
) -> Dense:
    """Description of a projection stored as `name`.weight [N, K] and `name`.bias [N]."""
    return fused_linear({name: (outputs,)}, inputs, bias=bias, join_axis=0, axes=axes)


def fused_linear(
    parts: Mapping[str, tuple[int, ...]],
    inputs: int,
    *,
    bias: bool,
    join_axis: int,
    axes: tuple[str | None, ...],
) -> Dense:
    """Description of several projections of one input, joined along one of their output axes.

    Args:
        parts: checkpoint name (without ".weight") to the output axes that part is viewed as.
        inputs: K.
        bias: each part also has a ".bias".
        join_axis: which of the output axes the parts are joined along.
        axes: logical names of [K, *N].
    """
    shapes = list(parts.values())
    joined = list(shapes[0])
    joined[join_axis] = sum(shape[join_axis] for shape in shapes)
    weights = tuple(
        Part(f"{name}.weight", (math.prod(view), inputs), (*view, inputs))
        for name, view in parts.items()
    )
    biases = tuple(Part(f"{name}.bias", (math.prod(view),), view) for name, view in parts.items())
    kernel: Any = ParamSpec(weights, (inputs, *joined), axes, "normal", join_axis, transpose=True)
    offset: Any = ParamSpec(biases, tuple(joined), axes[1:], "zeros", join_axis) if bias else None
    return Dense(kernel, offset)


def for_device(params: Any, device: jax.Device) -> Any:
    """The same parameters (or their shapes), of the types that multiply fastest on `device`.

    Weights are made anew one at a time, the largest first: where nobody keeps `params`, each finds
    the memory that one as large has left, and nothing is lost between them.
    """
    if not matmul.available(device):
        return params
    nodes, structure = jax.tree.flatten(params, is_leaf=lambda node: isinstance(node, Portable))
    del params
    for i in sorted(range(len(nodes)), key=lambda i: -num_bytes(nodes[i])):
        if isinstance(nodes[i], Portable):
            nodes[i] = nodes[i].on_hopper(device.device_kind)
    return jax.tree.unflatten(structure, nodes)


def num_bytes(tree: Any) -> int:
    """Of arrays, or of their shapes."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def param_bytes(specs: Any, dtype: jnp.dtype) -> int:
    """Bytes that the described parameters take in `dtype`."""
    leaves = jax.tree.leaves(specs)
    return sum(math.prod(spec.shape) * spec.dtype_among(dtype).itemsize for spec in leaves)


def param_shapes(specs: Any, dtype: jnp.dtype, mesh: Mesh | AbstractMesh | None = None) -> Any:
    """The described parameters in `dtype` as shapes alone, to compile and to count bytes with.

    On a mesh, these tell where they lie; see `paged.models.mesh.shares`.
    """

    def shape_of(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else spec.sharding_on(mesh)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype_among(dtype), sharding=sharding)

    return jax.tree.map(shape_of, specs)


def param_shardings(specs: Any, mesh: Mesh | None) -> Any:
    """The pytree of shardings for the described parameters on `mesh`; None without one."""
    if mesh is None:
        return None
    return jax.tree.map(lambda spec: spec.sharding_on(mesh), specs)
