"""Rows in groups, each with a weight of its own, and how they are cut into tiles on the device.

Nothing here has a shape that depends on how many rows a group has.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from paged.matmul.tiling import most_tiles


@struct.dataclass
class Groups:
    """How many rows of an array are whose: the first group's stand first, then the second's, ...

    Attributes:
        sizes: [X] int32. Rows that are nobody's stand last.
        most: that any group has (static).
    """

    sizes: jax.Array
    most: int = struct.field(pytree_node=False)


class WorkList(NamedTuple):
    """The row tiles of all groups, in their order.

    Attributes:
        tiles: [most tiles, 3] int32: the group, its first row in the tile, and its last row's next.
        count: [1] int32, how many there are.
    """

    tiles: jax.Array
    count: jax.Array


def work_list(groups: Groups, rows: int, height: int) -> WorkList:
    """Cut groups of `rows` in all into tiles of up to `height` rows.

    Sums over masks, since running sums and searches are several launches each.
    """
    sizes = groups.sizes
    index = jnp.arange(len(sizes))
    tiles = (sizes + height - 1) // height
    until = (index[:, None] <= index).astype(jnp.int32)  # [of, among]
    row_ends, tile_ends = sizes @ until, tiles @ until
    tile = jnp.arange(most_tiles(rows, len(sizes), height))
    group = jnp.sum(tile_ends <= tile[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, len(sizes) - 1)
    ends = row_ends[group]
    within = tile - (tile_ends - tiles)[group]
    first = ends - sizes[group] + within * height
    return WorkList(jnp.stack([group, first, ends], axis=1), tile_ends[-1:])
