"""Vectors on the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
"""[n, N], one of each text; or [N], that of one."""


def normalized(vectors: Vectors) -> Vectors:
    """[n, N] divided by their lengths; a vector of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
