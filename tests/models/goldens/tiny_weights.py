"""Weights of the tiny models, drawn by name so that goldens need not store them.

Shared by the script that makes the goldens and the tests that check them. RandomState's streams
never change between releases of numpy.
"""

from __future__ import annotations

import zlib

import numpy as np


def tiny_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values of one tensor, scaled so that activations stay near one."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.lower().endswith("norm.weight"):
        return (1 + 0.2 * noise).astype(np.float32)
    if name.endswith("bias"):
        return (0.3 * noise).astype(np.float32)
    if "embed_tokens" in name:
        return (0.5 * noise).astype(np.float32)
    return (1.2 * noise / np.sqrt(shape[-1])).astype(np.float32)
