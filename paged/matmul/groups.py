"""Rows in groups, each with a weight of its own: who stands where, worked out on the device.

No shape depends on how many rows a group has.

Axis letters, besides those of `paged.matmul`: X groups, P rows before they are put in groups, R
places for them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from paged.matmul.tiling import most_tiles

# Rows that are compared with each other, each with each, before sums over as many follow.
_COMPARED = 512


@struct.dataclass
class WorkList:
    """The row tiles of all groups, in their order.

    Attributes:
        groups: [most tiles] int32, the group of each.
        ends: [X] int32, how many there are up to each group's last.
        height: rows of a tile (static). Only a group's last tile may have fewer.
    """

    groups: jax.Array
    ends: jax.Array
    height: int = struct.field(pytree_node=False)


@struct.dataclass
class Groups:
    """How many rows of an array are whose: the first group's stand first, then the second's, ...

    Attributes:
        sizes: [X] int32.
        ends: [X] int32, sizes with all before them. Rows that are nobody's stand last.
        most: rows that any group has at most (static).
        work: tiles that the groups are cut into, if they were already.
    """

    sizes: jax.Array
    ends: jax.Array
    most: int = struct.field(pytree_node=False)
    work: WorkList | None = None

    @classmethod
    def of(cls, sizes: jax.Array, most: int) -> Groups:
        """Groups of these sizes."""
        return cls(sizes, running_sums(sizes), most)

    def owners(self, rows: int) -> jax.Array:
        """[rows] int32: the group of each row; of nobody's, some group."""
        return _owners(self.ends, rows)


class Order(NamedTuple):
    """Where rows go, that they stand in groups.

    Attributes:
        places: [P] int32, of each row; R for a row that is nobody's.
        rows: [R] int32, the row at each place. Groups may be larger than what they are given: at
            other places it is any number.
        groups: of the R places.
    """

    places: jax.Array
    rows: jax.Array
    groups: Groups


def in_groups(owners: jax.Array, num_groups: int, *, most: int, unit: int = 1) -> Order:
    """Put rows in groups, in each of which they keep their order.

    Sums over masks, since sorts, searches and running sums are several launches each.

    Args:
        owners: [P] int32, the group of each row; `num_groups` for a row that is nobody's.
        most: rows that any group may have.
        unit: of which all sizes of groups are to be multiples.
    """
    ranks, counts = _ranks(owners, num_groups)
    groups = Groups.of(padded(counts, unit), padded(most, unit))
    size = num_places(len(owners), num_groups, unit)
    starts = groups.ends - groups.sizes
    places = jnp.where(owners < num_groups, starts.at[owners].get(mode="clip") + ranks, size)
    row = jnp.arange(len(owners), dtype=jnp.int32)
    rows = jnp.zeros(size, jnp.int32).at[places].set(row, mode="drop", unique_indices=True)
    return Order(places, rows, groups)


def num_places(rows: int, num_groups: int, unit: int) -> int:
    """R, for any groups whose sizes are filled up to multiples of `unit`."""
    return padded(rows + (unit - 1) * min(num_groups, rows), unit)


def padded[Number: (int, jax.Array)](number: Number, unit: int) -> Number:
    """The next multiple of `unit`."""
    return (number + unit - 1) // unit * unit


def running_sums(numbers: jax.Array) -> jax.Array:
    """Of [..., X]: each with all before it."""
    index = jnp.arange(numbers.shape[-1])
    before = index <= index[:, None]
    return jnp.sum(jnp.where(before, numbers[..., None, :], 0), axis=-1, dtype=numbers.dtype)


def work_list(groups: Groups, rows: int, height: int) -> WorkList:
    """Cut groups of `rows` in all into tiles of up to `height` rows."""
    if groups.work is not None and groups.work.height == height:
        return groups.work
    ends = running_sums((groups.sizes + height - 1) // height)
    return WorkList(_owners(ends, most_tiles(rows, len(ends), height)), ends, height)


def _owners(ends: jax.Array, count: int) -> jax.Array:
    owners = jnp.sum(ends <= jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(owners, len(ends) - 1)


def _ranks(owners: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """How many earlier rows of its group a row has [P], and how many rows a group [X]; int32."""
    rows, width = len(owners), min(_COMPARED, len(owners))
    parts = jnp.pad(owners, (0, -rows % width), constant_values=num_groups).reshape(-1, width)
    index = jnp.arange(width)
    earlier = (parts[:, None, :] == parts[:, :, None]) & (index < index[:, None])
    ranks = jnp.sum(earlier, axis=-1, dtype=jnp.int32)
    is_owner = parts[:, None, :] == jnp.arange(num_groups)[:, None]
    counts = jnp.sum(is_owner, axis=-1, dtype=jnp.int32)  # [parts, X]
    if len(parts) == 1:
        return ranks[0, :rows], counts[0]
    totals = running_sums(counts.T).T
    before = jnp.take_along_axis(totals - counts, jnp.minimum(parts, num_groups - 1), axis=1)
    return (ranks + before).reshape(-1)[:rows], totals[-1]
