"""Few rows put in groups by one kernel of one program, where XLA would launch ten.

A decode step of a mixture reads so little that these launches would take as long as its products.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.kernels import Ref
from paged.matmul.groups import Groups, Order, WorkList, num_places, padded
from paged.matmul.tiling import ROW_UNIT, ROWS, most_tiles

MOST_ROWS = 64
"""With more, the many programs of XLA's kernels are faster than one: on an H200, with 128 groups,
9.3 us against 18 at 256 rows, but 9.2 against 5.1 at 64."""
# Comparisons of rows with groups at a time.
_COMPARED = 8192


def in_groups_at_once(
    owners: jax.Array, num_groups: int, *, most: int, interpret: bool = False
) -> Order:
    """As `in_groups` with a unit of `ROW_UNIT`; the groups are cut into tiles of `ROWS` rows too.

    `interpret` runs the kernel on a CPU.
    """
    size = num_places(len(owners), num_groups, ROW_UNIT)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    lengths = (len(owners), size, *[num_groups] * 3, most_tiles(size, num_groups, ROWS))
    places, rows, sizes, ends, tile_ends, tile_groups = pl.pallas_call(
        functools.partial(_kernel, num_groups=num_groups),
        name="paged_in_groups",
        in_specs=[anywhere],
        out_specs=[anywhere] * len(lengths),
        out_shape=[jax.ShapeDtypeStruct((length,), jnp.int32) for length in lengths],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )(owners)
    work = WorkList(tile_groups, tile_ends, ROWS)
    return Order(places, rows, Groups(sizes, ends, padded(most, ROW_UNIT), work))


def _kernel(
    owners_ref: Ref,
    places_ref: Ref,
    rows_ref: Ref,
    sizes_ref: Ref,
    ends_ref: Ref,
    tile_ends_ref: Ref,
    tile_groups_ref: Ref,
    *,
    num_groups: int,
) -> None:
    """All of it."""
    group = jnp.arange(pl.next_power_of_2(num_groups))
    at_a_time = max(1, _COMPARED // len(group))
    num_rows, size, num_tiles = (ref.shape[0] for ref in (owners_ref, rows_ref, tile_groups_ref))
    step = min(at_a_time, pl.next_power_of_2(num_rows))

    def owned(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Some rows, and which group's each is: int32 of 0 or 1, [rows, groups]."""
        row = turn * step + jnp.arange(step)
        owner = plgpu.load(owners_ref.at[row], mask=row < num_rows, other=num_groups)
        is_owner = (owner[:, None] == group[None, :]) & (group < num_groups)[None, :]
        return row, is_owner.astype(jnp.int32)

    turns = pl.cdiv(num_rows, step)
    nothing = jnp.zeros(len(group), jnp.int32)
    counts = lax.fori_loop(0, turns, lambda turn, sums: sums + owned(turn)[1].sum(0), nothing)
    sizes = padded(counts, ROW_UNIT)
    ends, tile_ends = lax.cumsum(sizes), lax.cumsum((sizes + ROWS - 1) // ROWS)
    of_groups = ((sizes_ref, sizes), (ends_ref, ends), (tile_ends_ref, tile_ends))
    for ref, values in of_groups:
        plgpu.store(ref.at[group], values, mask=group < num_groups)

    def place(turn: jax.Array, starts: jax.Array) -> jax.Array:
        row, is_owner = owned(turn)
        upto = starts[None, :] + lax.cumsum(is_owner, axis=0)
        found = is_owner.max(axis=1) > 0
        places = jnp.where(found, (is_owner * upto).sum(axis=1) - 1, size)
        plgpu.store(places_ref.at[row], places, mask=row < num_rows)
        plgpu.store(rows_ref.at[places], row, mask=found)
        return starts + is_owner.sum(axis=0)

    lax.fori_loop(0, turns, place, ends - sizes)

    def list_tiles(turn: jax.Array, carry: jax.Array) -> jax.Array:
        tile = turn * at_a_time + jnp.arange(at_a_time)
        owner = (tile_ends[None, :] <= tile[:, None]).astype(jnp.int32).sum(axis=1)
        owner = jnp.minimum(owner, num_groups - 1)
        plgpu.store(tile_groups_ref.at[tile], owner, mask=tile < num_tiles)
        return carry

    lax.fori_loop(0, pl.cdiv(num_tiles, at_a_time), list_tiles, jnp.int32(0))
