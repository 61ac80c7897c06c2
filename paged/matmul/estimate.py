"""How long a product takes with one tiling or another, roughly.

The estimate counts the turns that multiprocessors take, the buffers of a turn and the time of a
buffer, and compares with the time of reading the weight. Its constants are those of an H200, where
it names a tiling within a few percent of the best for most products of an 8B model.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from paged.kernels import MULTIPROCESSORS
from paged.matmul.tiling import ROWS, Plan, Tiling

# What a multiprocessor multiplies (FLOP of 16 bits; of 8 twice that), receives and reads from its
# share of the memory (bytes), and what all of them read, in a microsecond.
_FLOP, _RECEIVED, _READ, _ALL_READ = 6.3e6, 100e3, 40e3, 4.4e6
# What narrow accumulators reach of those FLOP: they read more shared memory for each.
_NARROW, _SHARE_OF_NARROW = 128, 0.84
# Microseconds of a launch, and of a sum of splits beside its traffic (bytes in a microsecond).
_LAUNCH, _SUM, _SUMMED = 2.5, 1.0, 3e6
# Registers of a multiprocessor, threads of a warpgroup, and what each needs besides accumulators.
_REGISTERS, _THREADS, _OTHER_REGISTERS = 65536, 128, 26
_HALF = jnp.dtype(jnp.bfloat16)


def ranked_tilings(
    m: int,
    k: int,
    n: int,
    *,
    gated: bool = False,
    residual: bool = False,
    dtype: jnp.dtype = _HALF,
) -> list[tuple[float, Tiling]]:
    """All tilings worth a try, with the microseconds they are thought to take, best first.

    `dtype` is of the operands. For the other arguments see `tiling_for`.
    """
    # A row of shared memory holds twice as much of K in 8 bits.
    longer = 2 // dtype.itemsize
    tilings = [dataclasses.replace(t, depth=t.depth * longer) for t in _candidates(m, gated)]
    if longer > 1 and m <= ROWS:
        # Of equals the deepest first: so few rows leave room for it, and it gains a few percent.
        tilings.sort(key=lambda tiling: -tiling.depth)
    plans = [_plan(m, k, n, gated, residual, tiling, dtype) for tiling in tilings]
    rated = [(_microseconds(plan), plan.tiling) for plan in plans if _fits(plan)]
    return sorted(rated, key=lambda pair: pair[0])


def grouped_tilings(m: int, groups: int, k: int, n: int, *, gated: bool = False) -> list[Tiling]:
    """The tilings worth a try for rows in groups, what is good for most shapes first.

    For the arguments see `grouped_tiling_for`.

    Raises:
        ValueError: no tiling cuts them evenly.
    """
    few = m <= ROWS * groups
    plain = _plan(m, k, n, gated, False, Tiling())
    plan = dataclasses.replace(plain, groups=groups, most=m)
    tilings = _for_few_of_each(gated) if few else _for_many_of_each()
    fitting = [each for each in tilings if _fits(dataclasses.replace(plan, tiling=each))]
    if not fitting:
        raise ValueError(f"no tiling cuts K of {k} and {n} columns evenly; see supports_groups")
    return fitting


def _for_few_of_each(gated: bool) -> list[Tiling]:
    """For groups that one warpgroup takes: what counts is to read their weights at full speed."""
    one = Tiling(row_warpgroups=1)
    narrow = dataclasses.replace(one, widths=(128,) if gated else (64,))
    wide = dataclasses.replace(one, widths=(256,) if gated else (128,))
    return [
        dataclasses.replace(narrow, residents=2),
        dataclasses.replace(narrow, residents=2, depth=128),
        narrow,
        dataclasses.replace(narrow, depth=128),
        dataclasses.replace(narrow, column_warpgroups=2),
        dataclasses.replace(narrow, column_warpgroups=2, depth=128),
        dataclasses.replace(wide, residents=2),
        wide,
        dataclasses.replace(wide, column_warpgroups=2),
    ]


def _for_many_of_each() -> list[Tiling]:
    """For groups of several warpgroups: what counts is to multiply at full speed."""
    return [
        Tiling(column_cluster=2),
        Tiling(),
        Tiling(widths=(128,), residents=2),
        Tiling(widths=(192,), column_cluster=2),
        Tiling(widths=(192,), row_warpgroups=3),
        Tiling(widths=(128,), row_warpgroups=3),
        Tiling(row_warpgroups=1, column_warpgroups=2),
        Tiling(row_warpgroups=1, widths=(128,), residents=2),
    ]


def bound(m: int, k: int, columns: int) -> float:
    """Microseconds of a product whose weight is [k, columns] if nothing were idle."""
    reading = 2 * k * columns / _ALL_READ
    return _LAUNCH + max(reading, 2 * m * k * columns / (_FLOP * MULTIPROCESSORS))


def _candidates(m: int, gated: bool) -> list[Tiling]:
    """The widest first: of equals they spare the caches most."""
    # With more rows there are tiles enough for all multiprocessors without cutting K.
    splits = (1,) if gated or m > 512 else (1, 2, 4)
    tilings = _candidates_for_few(gated, splits) if m <= ROWS else _candidates_for_many(m, splits)
    # More of K at a time: fewer rounds of barriers, for which there is room with narrow tiles.
    narrow = [tiling for tiling in tilings if tiling.widths == (64,) and m <= 512]
    return tilings + [dataclasses.replace(tiling, depth=128) for tiling in narrow]


def _candidates_for_few(gated: bool, splits: tuple[int, ...]) -> list[Tiling]:
    """For rows that one warpgroup takes, perhaps two side by side where gates halve the columns."""
    single = [
        Tiling(row_warpgroups=1, widths=(width,), splits=parts, residents=residents)
        for residents in (1, 2)
        for width in (256, 128, 64)
        for parts in splits
    ]
    return single + [dataclasses.replace(each, column_warpgroups=2) for each in single if gated]


def _candidates_for_many(m: int, splits: tuple[int, ...]) -> list[Tiling]:
    """For rows of several warpgroups, on their own or with a neighbour that shares what is read."""
    # Up to 128 rows are one program's: none has other rows of the same columns to share a weight.
    clusters = ((1, 1), (1, 2)) if m <= 128 else ((2, 1), (1, 1))
    shared: tuple[tuple[int, ...], ...] = ((256,), (256, 192), (192,), (128,), (64,))
    # Three warpgroups have no registers for 256 columns at once.
    shapes = [(2, widths) for widths in shared]
    shapes += [(3, widths) for widths in ((192, 64), *shared) if m > 128]
    return [
        Tiling(
            row_warpgroups=warpgroups,
            widths=widths,
            row_cluster=rows,
            column_cluster=columns,
            splits=parts,
        )
        for warpgroups, widths in shapes
        for rows, columns in clusters
        for parts in splits
    ]


def _plan(
    m: int,
    k: int,
    n: int,
    gated: bool,
    residual: bool,
    tiling: Tiling,
    dtype: jnp.dtype = _HALF,
) -> Plan:
    split = tiling.splits > 1
    return Plan(
        tiling=tiling,
        m=m,
        k=k,
        n=n,
        gated=gated,
        residual=residual and not split,
        dtype=dtype,
        out_dtype=jnp.dtype(jnp.float32 if split else jnp.bfloat16),
        interpreted=False,
        scaled=dtype.itemsize == 1 and not split,
    )


def _fits(plan: Plan) -> bool:
    """Whether buffers and accumulators fit into a multiprocessor, and K and columns are whole.

    Rows of shared memory shorter than 128 bytes would fit, but take the copies too long. Fewer
    than three buffers are too few to copy ahead.
    """
    tile = plan.tiling
    whole = plan.k % (tile.depth * tile.splits) == 0 and plan.column_unit == 64
    accumulator = ROWS * max(tile.widths) // _THREADS
    registers = _REGISTERS // (_THREADS * (tile.warpgroups + 1))
    enough = accumulator + _OTHER_REGISTERS <= registers
    return whole and enough and plan.stages >= min(3, plan.steps)


def _microseconds(plan: Plan) -> float:
    """How long the product takes, roughly."""
    tile = plan.tiling
    turns = -(-plan.tiles // plan.clusters)
    sharing = -(-plan.clusters * tile.cluster // MULTIPROCESSORS)
    width = sum(tile.widths) * tile.column_warpgroups
    share = _SHARE_OF_NARROW if max(tile.widths) <= _NARROW else 1
    flop = 2 * tile.height * width * tile.depth / share
    item = plan.dtype.itemsize
    x_bytes = item * plan.rows_loaded * tile.row_warpgroups * tile.depth / tile.column_cluster
    w_bytes = item * tile.depth * width / tile.row_cluster
    rate = _FLOP * 2 / item
    step = max(flop / rate, (x_bytes + w_bytes) / _RECEIVED, w_bytes / _READ)
    reading = item * plan.k * plan.n * plan.halves / _ALL_READ
    total = _LAUNCH + max(turns * plan.steps * step * sharing, reading)
    if tile.splits > 1:
        # Each part is written and read again, in float32.
        total += _SUM + 8 * plan.m * plan.n * tile.splits / _SUMMED
    return total
