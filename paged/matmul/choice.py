"""Which tiling a product gets: what was measured for its shape, or else what an estimate says.

The estimate counts, for each of a few tilings, the turns that multiprocessors take, the buffers of
a turn and the time of a buffer, and compares with the time of reading the weight. Its constants are
those of an H200. It has no number for XLA, whose own products are hard to beat with few rows, where
memory is all that counts, and with very many: those it leaves to XLA.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from paged.matmul.tiling import MULTIPROCESSORS, Plan, Tiling
from paged.matmul.tuned import TUNED

# Estimates: what a multiprocessor multiplies (FLOP), receives and what it reads from its memory
# (bytes), in a microsecond; what a launch takes, and a sum of splits beside its traffic.
_FLOP, _RECEIVED, _READ = 6.3e6, 100e3, 40e3
# Of those FLOP, what narrow accumulators reach: they read more shared memory for each.
_NARROW, _SHARE_OF_NARROW = 128, 0.84
_LAUNCH, _SUM = 2.5, 1.0
# Registers of a multiprocessor, threads of a warpgroup, and what each needs besides accumulators.
_REGISTERS, _THREADS, _OTHER_REGISTERS = 65536, 128, 26
# Rows from which, and up to which, the estimate speaks for shapes nobody measured.
_FEWEST, _FEWEST_GATED, _MOST = 16, 8, 1024


def tiling_for(
    m: int,
    k: int,
    n: int,
    *,
    gated: bool = False,
    residual: bool = False,
    device: str = "NVIDIA H200",
) -> Tiling | None:
    """The fastest known tiling for x [m, k] and an output [m, n]; None where XLA is faster.

    Args:
        gated: the weight holds gates too, [k, 2, n].
        residual: [m, n] is added. It favours tilings that need no sum of splits.
        device: `jax.Device.device_kind` of a Hopper GPU.
    """
    measured = TUNED.get(device, {}).get((gated, k, n))
    if measured is None:
        return _estimated(m, k, n, gated, residual)
    return next((tiling for most, tiling in measured if m <= most), measured[-1][1])


@functools.cache
def _estimated(m: int, k: int, n: int, gated: bool, residual: bool) -> Tiling | None:
    if m < (_FEWEST_GATED if gated else _FEWEST) or (m > _MOST and not gated):
        return None
    ranked = ranked_tilings(m, k, n, run=n if gated else 0, residual=residual)
    return ranked[0][1] if ranked else None


def ranked_tilings(
    m: int, k: int, n: int, *, run: int = 0, residual: bool = False
) -> list[tuple[float, Tiling]]:
    """All tilings worth a try, with the microseconds they are thought to take, best first.

    Args:
        run: of gates in the weight, see `Plan`.
        residual: see `tiling_for`.
    """
    plans = [_plan(m, k, n, run, residual, tiling) for tiling in _candidates(m, run > 0)]
    rated = [(_microseconds(plan), plan.tiling) for plan in plans if _fits(plan)]
    return sorted(rated, key=lambda pair: pair[0])


def _candidates(m: int, gated: bool) -> list[Tiling]:
    """The widest first: of equals they spare the caches most."""
    splits = (1,) if gated or m > 512 else (1, 2, 4)
    if m <= 64:
        few = [
            Tiling(row_warpgroups=1, widths=(width,), splits=parts, residents=residents)
            for residents in (1, 2)
            for width in (256, 128, 64)
            for parts in splits
        ]
        deep = [dataclasses.replace(each, depth=128) for each in few if each.widths == (64,)]
        return few + deep + [dataclasses.replace(t, column_warpgroups=2) for t in few if gated]
    clusters = ((1, 1), (1, 2)) if m <= 128 else ((2, 1), (1, 1))
    return [
        Tiling(
            row_warpgroups=warpgroups,
            widths=widths,
            row_cluster=rows,
            column_cluster=columns,
            splits=parts,
        )
        for warpgroups in ((2, 3) if m > 128 else (2,))
        for widths in ((256,), (256, 192), (192,), (192, 64), (128,), (64,))
        for rows, columns in clusters
        for parts in splits
    ]


def _plan(m: int, k: int, n: int, run: int, residual: bool, tiling: Tiling) -> Plan:
    split = tiling.splits > 1
    return Plan(
        tiling=tiling,
        m=m,
        k=k,
        n=n,
        run=run,
        apart=run == n,
        residual=residual and not split,
        dtype=jnp.dtype(jnp.bfloat16),
        out_dtype=jnp.dtype(jnp.float32 if split else jnp.bfloat16),
        interpreted=False,
    )


def _fits(plan: Plan) -> bool:
    """Whether buffers and accumulators fit into a multiprocessor, and K and columns are whole.

    Rows of shared memory shorter than 128 bytes would fit, but take the copies too long.
    """
    tile = plan.tiling
    whole = plan.k % (tile.depth * tile.splits) == 0 and plan.swizzle == 64
    accumulator = tile.rows * max(tile.widths) // _THREADS
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
    x_bytes = 2 * plan.rows_loaded * tile.row_warpgroups * tile.depth / tile.column_cluster
    w_bytes = 2 * tile.depth * width / tile.row_cluster
    step = max(flop / _FLOP, (x_bytes + w_bytes) / _RECEIVED, w_bytes / _READ)
    reading = 2 * plan.k * plan.n * plan.halves / (4.4e6)
    total = _LAUNCH + max(turns * plan.steps * step * sharing, reading)
    if tile.splits > 1:
        total += _SUM + 8 * plan.m * plan.n * tile.splits / 3e6
    return total
