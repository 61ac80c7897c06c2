"""How a query scores a key, as far as it is fixed when a step is compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOG2_E = math.log2(math.e)
"""By which kernels multiply scores: their softmax runs in powers of two, for exp2 is one
instruction."""

MASKED, LOWEST = -1e30, -1e20
"""A masked score, and where running maxima start: far below any real score, far above a masked one,
so that masked scores weigh nothing even where nothing else has been seen."""


@dataclass(frozen=True)
class Scoring:
    """What a model makes of the product of a query and a key. Hashable: a layer compiles for it.

    Attributes:
        scale: multiplies q·k (usually D ** -0.5).
        window: a token sees itself and the `window - 1` positions before it; None sees all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2); None for none.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
