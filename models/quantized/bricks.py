"""Weights alone quantised, as a Hopper GPU multiplies them: in bricks of `paged.matmul.bricks`."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from paged import matmul
from paged.models.weights import PINNED, Portable, Unfused

# Pieces of rows that are multiplied one after the other, each unpacking the weight anew. On an H200
# two take as long as writing it out, and four a tenth more to a half. But what is written out takes
# memory: 1 GB for the vocabulary of an 8B model, which is not for such weights.
_MOST_PIECES, _MOST_PIECES_OF_LARGE, _LARGE = 2, 4, 2**29
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


@struct.dataclass
class InBricks(Unfused, Portable):
    """A weight of 4 bits, or of floats of 8, with a scale for each group of inputs of each output.

    Few rows are multiplied out of registers, more in pieces. For many it pays to write the weight
    out once.

    Attributes:
        words: [N / 64, K / 64, *shape of a brick] uint32.
        scale: [K / group, N].
        zero: [K / group, N] in the dtype of `scale`, the value less 8 that stands for 0; or None.
        order: [K] int32, which input each is for; None for the order they come in.
        bias: [*N] or None.
        outputs: *N (static).
    """

    words: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    order: jax.Array | None
    bias: jax.Array | None
    outputs: tuple[int, ...] = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        out = self._product(self._ordered(x), jnp.dtype(dtype or x.dtype))
        out = out.reshape(len(x), *self.outputs)
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def gated(self, x: jax.Array, activation: str) -> jax.Array:
        """See `Linear`."""
        whole = self.outputs[1] % matmul.BRICK == 0 and self.bias is None
        if activation != "silu" or not whole or not self._goes_in_registers(x):
            return Unfused.gated(self, x, activation)
        return self._product(self._ordered(x), x.dtype, gated=True)

    def on_hopper(self, device_kind: str) -> InBricks:
        """See `Portable`."""
        return self

    def _ordered(self, x: jax.Array) -> jax.Array:
        """Inputs as the words have them."""
        return x if self.order is None else jnp.take(x, self.order, axis=-1)

    def _goes_in_registers(self, x: jax.Array) -> bool:
        """Whether rows are few enough to unpack the weight as it comes, and not write it out."""
        large = x.shape[1] * self.scale.shape[1] * x.dtype.itemsize > _LARGE
        pieces = _MOST_PIECES_OF_LARGE if large else _MOST_PIECES
        return len(x) <= pieces * matmul.MOST_NARROW_ROWS and x.dtype.itemsize == 2

    def _product(self, x: jax.Array, dtype: jnp.dtype, *, gated: bool = False) -> jax.Array:
        """[T, N], or with gates [T, N / 2]: these are for rows that go in registers alone."""
        if self._goes_in_registers(x):
            scale = self.scale.astype(x.dtype)
            zero = None if self.zero is None else self.zero.astype(x.dtype)

            def product(rows: jax.Array) -> jax.Array:
                return matmul.narrow_matmul(
                    rows, self.words, scale, zero, gated=gated, out_dtype=dtype
                )

            return _in_pieces(product, x)
        expanded = matmul.expanded(self.words, self.scale, self.zero).astype(x.dtype)
        return jax.lax.dot_general(x, expanded, _CONTRACT_LAST, preferred_element_type=dtype)


def _in_pieces(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A function of rows [T, K] to [T, N], called with as few pieces as the kernel takes.

    All have the same size, so that a loop can call it: each turn writes its rows where they belong
    in the result. Called one after the other, the pieces would take as much memory once more, until
    they are joined. Sizes are multiples of the kernel's unit, lest each turn fill up rows.
    """
    pieces = ceil(len(x) / matmul.MOST_NARROW_ROWS)
    if pieces == 1:
        return function(x)
    padded = jnp.pad(x, ((0, -len(x) % (pieces * matmul.ROW_UNIT)), (0, 0)))
    made = jax.lax.map(function, padded.reshape(pieces, -1, x.shape[1]))
    return made.reshape(-1, made.shape[-1])[: len(x)]


def fits_bricks(array: Any, inputs: int, outputs: int, group: int, dtype: jnp.dtype) -> bool:
    """Whether the kernels take a weight with such groups, for activations of `dtype`.

    `array` is the weight or its shape. One that several devices share stays as they share it.
    """
    sharding = getattr(array, "sharding", None)
    alone = sharding is None or sharding.num_devices == 1
    return alone and dtype.itemsize == 2 and matmul.supports_narrow(1, inputs, outputs, group)


def made[W, T](function: Callable[[W], T], weight: W) -> T:
    """What a jitted function makes of a weight, where that lies; of its shapes, the shapes of that.

    What it makes must have axes that go into shares as those of the weight's first array do.
    """
    first = jax.tree.leaves(weight)[0]
    place = first.sharding
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place),
            jax.eval_shape(function, weight),
        )
    pinned = place.memory_kind == PINNED
    on_device = jax.device_put(weight, place.with_memory_kind("device")) if pinned else weight
    done = function(on_device)
    # Before the next one comes, which there might be no room for beside this one.
    return jax.block_until_ready(jax.device_put(done, place) if pinned else done)
