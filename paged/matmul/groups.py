"""Rows in groups, each with a weight of its own: who stands where, worked out on the device.

No shape depends on how many rows a group has. The sums are over masks: sorts, searches and running
sums are several launches each.

Axis letters, besides those of `paged.matmul`: X groups, P rows before they are put in groups.
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
class Groups:
    """How many rows of an array are whose: the first group's stand first, then the second's, ...

    Attributes:
        sizes: [X] int32. Rows that are nobody's stand last.
        most: that any group has (static).
    """

    sizes: jax.Array
    most: int = struct.field(pytree_node=False)

    def owners(self, rows: int) -> jax.Array:
        """[rows] int32: the group of each row; of nobody's, some group."""
        ends = running_sums(self.sizes)
        owners = jnp.sum(ends <= jnp.arange(rows)[:, None], axis=1, dtype=jnp.int32)
        return jnp.minimum(owners, len(ends) - 1)


class Order(NamedTuple):
    """Where rows go, that they stand in groups.

    Attributes:
        places: [P] int32, of each row; `size` for a row that is nobody's.
        groups: of the array of `size` rows. They may be larger than what they are given: what is
            at no row's place is anything.
        size: places there are.
    """

    places: jax.Array
    groups: Groups
    size: int


def in_groups(owners: jax.Array, num_groups: int, *, most: int, unit: int = 1) -> Order:
    """Put rows in groups, in each of which they keep their order.

    Args:
        owners: [P] int32, the group of each row; `num_groups` for a row that is nobody's.
        most: rows that any group may have.
        unit: of which all sizes of groups are to be multiples.
    """
    ranks, counts = _ranks(owners, num_groups)
    sizes = (counts + unit - 1) // unit * unit
    starts = running_sums(sizes) - sizes
    # What a group lacks of a multiple is at most `unit` - 1 rows, and nothing if it has none.
    rows = len(owners) + (unit - 1) * min(num_groups, len(owners))
    size = (rows + unit - 1) // unit * unit
    places = starts.at[owners].get(mode="clip") + ranks
    most = (most + unit - 1) // unit * unit
    return Order(jnp.where(owners < num_groups, places, size), Groups(sizes, most), size)


def running_sums(numbers: jax.Array) -> jax.Array:
    """Of [..., X]: each with all before it."""
    index = jnp.arange(numbers.shape[-1])
    before = index <= index[:, None]
    return jnp.sum(jnp.where(before, numbers[..., None, :], 0), axis=-1, dtype=numbers.dtype)


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


class WorkList(NamedTuple):
    """The row tiles of all groups, in their order.

    Attributes:
        group: [most tiles] int32, of each tile.
        sizes: [X] int32, of the groups.
        ends: [2, X] int32, of the groups: rows, and tiles, of each with all before it.
    """

    group: jax.Array
    sizes: jax.Array
    ends: jax.Array


def work_list(groups: Groups, rows: int, height: int) -> WorkList:
    """Cut groups of `rows` in all into tiles of up to `height` rows."""
    sizes = groups.sizes
    tiles = (sizes + height - 1) // height
    ends = running_sums(jnp.stack([sizes, tiles]))
    tile = jnp.arange(most_tiles(rows, len(sizes), height))
    group = jnp.sum(ends[1] <= tile[:, None], axis=1, dtype=jnp.int32)
    return WorkList(group, sizes, ends)
