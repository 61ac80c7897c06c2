"""Which tiling a product gets: what was measured for its shape, or else what an estimate says."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from paged.kernels import up_to
from paged.matmul.estimate import bound, grouped_tilings, ranked_tilings
from paged.matmul.tiling import Tiling
from paged.matmul.tuned import GROUPED, SCALED, TUNED

# The estimate has no number for XLA. Where XLA is hard to beat a shape that nobody measured is left
# to it: with few rows, for memory is all that counts then, and a small weight even with some; with
# very many; and where the best tiling is so far from the bound that XLA may well cut better. Gates
# may be further from it: XLA needs another kernel for them.
_FEWEST, _FEWEST_GATED, _FEWEST_OF_SMALL, _MOST = 16, 8, 64, 1024
_SMALL_BYTES = 40_000_000
_MOST_OF_BOUND, _MOST_OF_BOUND_GATED = 1.4, 1.6
# The kind that stands for those that nobody tuned.
_NEAREST = "NVIDIA H200"


def tiling_for(
    m: int,
    k: int,
    n: int,
    *,
    device_kind: str,
    gated: bool = False,
    residual: bool = False,
) -> Tiling | None:
    """The fastest known tiling for x [m, k] and an output [m, n]; None where XLA is faster.

    Args:
        device_kind: `jax.Device.device_kind` of a Hopper GPU. What was not measured on its kind
            counts as on an H200, whose multiprocessors are the same.
        gated: the weight holds gates too, [k, 2, n].
        residual: [m, n] is added. It favours tilings that need no sum of splits.
    """
    measured = _measured(TUNED, device_kind, (gated, k, n))
    return _estimated(m, k, n, gated, residual) if measured is None else up_to(m, measured)


@functools.cache
def _estimated(m: int, k: int, n: int, gated: bool, residual: bool) -> Tiling | None:
    small = not gated and 2 * k * n < _SMALL_BYTES
    fewest = _FEWEST_GATED if gated else _FEWEST_OF_SMALL if small else _FEWEST
    if m < fewest or (m > _MOST and not gated):
        return None
    ranked = ranked_tilings(m, k, n, gated=gated, residual=residual)
    if not ranked:
        return None
    microseconds, tiling = ranked[0]
    limit = _MOST_OF_BOUND_GATED if gated else _MOST_OF_BOUND
    return tiling if microseconds < limit * bound(m, k, 2 * n if gated else n) else None


def scaled_tiling_for(
    m: int,
    k: int,
    n: int,
    *,
    device_kind: str,
    gated: bool = False,
    residual: bool = False,
) -> Tiling | None:
    """The fastest known tiling for operands of 8 bits; None where none cuts them evenly.

    For the arguments see `tiling_for`. XLA is not weighed: for floats of 8 bits it takes minutes to
    tune itself, and what follows these products costs it kernels of their own.
    """
    measured = _measured(SCALED, device_kind, (gated, k, n))
    return _ranked_scaled(m, k, n, gated, residual) if measured is None else up_to(m, measured)


@functools.cache
def _ranked_scaled(m: int, k: int, n: int, gated: bool, residual: bool) -> Tiling | None:
    dtype = jnp.dtype(jnp.float8_e4m3fn)
    ranked = ranked_tilings(m, k, n, gated=gated, residual=residual, dtype=dtype)
    return ranked[0][1] if ranked else None


def grouped_tiling_for(
    m: int, groups: int, k: int, n: int, *, device_kind: str, gated: bool = False
) -> Tiling:
    """A tiling for x [m, k] in groups, each with a weight of its own, and an output [m, n].

    What was not measured on the kind of device, or on an H200, gets what is good for most shapes.

    Args:
        m: rows, with what groups are filled up by.
        groups: how many weights there are.
        device_kind, gated: see `tiling_for`.

    Raises:
        ValueError: no tiling cuts them evenly.
    """
    measured = _measured(GROUPED, device_kind, (gated, groups, k, n))
    if measured is None:
        return grouped_tilings(m, groups, k, n, gated=gated)[0]
    return up_to(m, measured)


def _measured[P, T](table: Mapping[str, Mapping[P, T]], device_kind: str, product: P) -> T | None:
    """What a table has for a product, on a kind of device or else on the nearest."""
    return table.get(device_kind, {}).get(product, table[_NEAREST].get(product))
