"""Least squares for what cannot be negative, as the time that something takes."""

from __future__ import annotations

import numpy as np


def least_squares(features: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Coefficients [F], none below 0, with which rows [N, F] come nearest to what is wanted [N].

    What would come out below 0 is left out, and the others are found anew without it. A feature
    that no row has gets 0.
    """
    kept = np.flatnonzero(features.any(axis=0))
    scales = np.abs(features).max(axis=0)
    found = np.zeros(features.shape[1])
    while len(kept):
        scaled = features[:, kept] / scales[kept]
        solved = np.linalg.lstsq(scaled, wanted, rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved / scales[kept]
            break
        kept = np.delete(kept, solved.argmin())
    return found
