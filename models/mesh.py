"""The devices that share a model, as code that runs on each of them sees the others.

A mesh has one axis. All but `shares` is for code under `jax.shard_map` over it, see
`paged.models.spread`; where a device has all of an array, it does nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

TENSOR = "tensor"
"""The axis of a mesh: the devices among which the weights of a layer are shared out."""


def shares(shapes: Any) -> Any:
    """What one device has of arrays, as shapes, by how they lie on all of them."""

    def share(each: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = each.shape if each.sharding is None else each.sharding.shard_shape(each.shape)
        return jax.ShapeDtypeStruct(shape, each.dtype)

    return jax.tree.map(share, shapes)


def first_of(share: int) -> jax.Array:
    """Where this device's share begins, of what is shared out by `share` to each; [] int32."""
    return jax.lax.axis_index(TENSOR) * share


def own_part(x: jax.Array, share: int, axis: int) -> jax.Array:
    """This device's `share` of an axis, of an array that all devices have."""
    if x.shape[axis] == share:
        return x
    return jax.lax.dynamic_slice_in_dim(x, first_of(share), share, axis)


def gathered(x: jax.Array, size: int) -> jax.Array:
    """x [..., size], of what each device has of its last axis, which may be all of it."""
    if x.shape[-1] == size:
        return x
    return jax.lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True)


def highest(scores: jax.Array, size: int) -> jax.Array:
    """Index [R] int32 of the highest score of each row, the first of equal ones.

    `scores` [R, N] are those of all `size`, or of this device's share. Devices then exchange no
    more than the highest of each.
    """
    index = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    share = scores.shape[-1]
    if share == size:
        return index
    best = jnp.max(scores, axis=-1).astype(jnp.float32)
    words = jnp.stack([jax.lax.bitcast_convert_type(best, jnp.int32), index + first_of(share)])
    bits, indices = jnp.moveaxis(jax.lax.all_gather(words, TENSOR), 1, 0)  # each [devices, R]
    best_of = jax.lax.bitcast_convert_type(bits, jnp.float32)
    device = jnp.argmax(best_of, axis=0)
    return jnp.take_along_axis(indices, device[None], axis=0)[0]
