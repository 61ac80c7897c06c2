"""How products with weights out of registers are cut (see `paged.matmul.narrow`)."""

from __future__ import annotations

from jax.experimental import pallas as pl

from paged.kernels import MULTIPROCESSORS, up_to
from paged.matmul.bricks import BRICK, INT4, Kind
from paged.matmul.tiling import Cut
from paged.matmul.tuned import NARROW_FP8, NARROW_INT4

MEASURED_GROUP = 128
"""Inputs that share a scale, in the weights that were measured."""

MOST_RUN = 128
"""Inputs whose sums are scaled at once: the weights of more do not fit in registers beside them."""


def scales_sums(columns: int, run: int) -> bool:
    """Whether a run of inputs that share a scale has its sums scaled, and not its weights.

    For so many columns, which are rows of x: weights are scaled two at a time, sums one by one, and
    these have to be begun and read, too.
    """
    return run >= BRICK and 4 * columns <= run


def cut_for(kind: Kind, m: int, k: int, n: int, group: int) -> Cut:
    """What was measured for x [m, k] and a weight [n, k] of a kind, or else what is likely best."""
    table = (NARROW_INT4 if kind is INT4 else NARROW_FP8)["NVIDIA H200"]
    measured = table.get((k, n)) if group == MEASURED_GROUP else None
    return up_to(m, measured) if measured else candidate_cuts(m, k, n, group)[0]


def candidate_cuts(m: int, k: int, n: int, group: int) -> list[Cut]:
    """Those worth a try, what is likely best first.

    All programs run at a time, and few multiprocessors are idle. The order is that of products of
    1 and 16 rows with the weights of an 8B model on an H200.
    """
    shapes = [(2, 2, 128), (2, 1, 256), (4, 1, 128), (2, 1, 128)]
    if scales_sums(m, min(group, MOST_RUN)):
        shapes = [(4, 1, 256), (2, 2, 256), *shapes]
    elif m > 128:
        shapes = [(2, 1, BRICK), (2, 1, 128), (1, 1, BRICK), (1, 1, 128)]
    elif m > 64:
        shapes = [(2, 1, 128), (2, 1, BRICK), (1, 2, 128), (1, 1, 128)]
    cuts = []
    for warpgroups, residents, depth in shapes:
        tiles, room = pl.cdiv(n, BRICK * warpgroups), MULTIPROCESSORS * residents
        most = max(1, k // depth // 4)
        if k % depth == 0 and (group % depth == 0 or depth % group == 0):
            splits = max(1, min(room // tiles, most))
            cuts.append(Cut(warpgroups, splits, depth, residents))
    return sorted(cuts, key=lambda cut: _turns(cut, n))


def _turns(cut: Cut, n: int) -> float:
    """How much longer than all multiprocessors together the busiest programs take."""
    units, room = pl.cdiv(n, BRICK * cut.warpgroups) * cut.splits, MULTIPROCESSORS * cut.residents
    # With one turn, a multiprocessor reads faster where others are idle.
    return 1 if units <= room else pl.cdiv(units, room) * room / units
