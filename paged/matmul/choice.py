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

from paged.matmul.tiling import Plan, Tiling
from paged.matmul.tuned import TUNED

# Estimates: what a multiprocessor multiplies (FLOP), receives and what it reads from its memory
# (bytes), in a microsecond; what a launch takes, and a sum of splits beside its traffic.
_FLOP, _RECEIVED, _READ = 6.3e6, 100e3, 40e3
_LAUNCH, _SUM = 2.5, 0.6
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
    plans = [_plan(m, k, n, gated, residual, tiling) for tiling in _candidates(m, gated)]
    fitting = [plan for plan in plans if _fits(plan)]
    return min(fitting, key=_microseconds).tiling if fitting else None


def _candidates(m: int, gated: bool) -> list[Tiling]:
    """Those that won somewhere, the widest first: of equals they spare the caches most."""
    warpgroups = 1 if m <= 64 else 2
    clusters = [1] if m <= 128 else [1, 2]
    tilings = [
        Tiling(row_warpgroups=warpgroups, widths=(width,), row_cluster=cluster, splits=splits)
        for width in (256, 192, 128, 64)
        for cluster in clusters
        for splits in ((1,) if gated or m > 512 else (1, 2, 4))
    ]
    if gated and m <= 64:
        tilings += [dataclasses.replace(t, column_warpgroups=2) for t in tilings]
    return tilings


def _plan(m: int, k: int, n: int, gated: bool, residual: bool, tiling: Tiling) -> Plan:
    split = tiling.splits > 1
    return Plan(
        tiling=tiling,
        m=m,
        k=k,
        n=n,
        run=n if gated else 0,
        apart=gated,
        residual=residual and not split,
        dtype=jnp.dtype(jnp.bfloat16),
        out_dtype=jnp.dtype(jnp.float32 if split else jnp.bfloat16),
        interpreted=False,
    )


def _fits(plan: Plan) -> bool:
    """Whether K is a whole number of buffers, rows of shared memory are whole, and enough of them.

    Rows shorter than 128 bytes take the copies too long.
    """
    tile = plan.tiling
    whole = plan.k % (tile.depth * tile.splits) == 0
    return whole and plan.swizzle == 64 and plan.stages >= min(4, plan.steps)


def _microseconds(plan: Plan) -> float:
    """How long the product takes, roughly."""
    tile = plan.tiling
    turns = -(-plan.tiles // plan.clusters)
    width = sum(tile.widths) * tile.column_warpgroups
    flop = 2 * tile.height * width * tile.depth
    x_bytes = 2 * plan.rows_loaded * tile.row_warpgroups * tile.depth / tile.column_cluster
    w_bytes = 2 * tile.depth * width / tile.row_cluster
    step = max(flop / _FLOP, (x_bytes + w_bytes) / _RECEIVED, w_bytes / _READ)
    reading = 2 * plan.k * plan.n * plan.halves / (4.4e6)
    total = _LAUNCH + max(turns * plan.steps * step, reading)
    if tile.splits > 1:
        total += _SUM + 8 * plan.m * plan.n * tile.splits / 3e6
    return total
