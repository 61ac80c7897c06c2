"""Rows of logits of many kinds, filters for them, and what sorting keeps of them."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


class Filters(NamedTuple):
    """What is wanted of a row."""

    temperature: float = 1.0
    top_k: int = 2**30
    top_p: float = 1.0
    min_p: float = 0.0


FILTERS = (
    Filters(),
    Filters(top_k=1),
    Filters(top_k=2),
    Filters(top_k=50),
    Filters(top_k=1000),
    Filters(top_p=1e-6),
    Filters(top_p=0.1),
    Filters(top_p=0.9),
    Filters(top_p=0.999),
    Filters(min_p=0.05),
    Filters(min_p=1.0),
    Filters(top_k=50, top_p=0.9),
    Filters(top_k=1000, top_p=0.5),
    Filters(top_k=50, min_p=0.3),
    Filters(top_p=0.8, min_p=0.01),
    Filters(top_k=20, top_p=0.95, min_p=0.02),
    Filters(temperature=0.01, top_k=50, top_p=0.9),
    Filters(temperature=1e6, top_p=0.7),
    Filters(temperature=1e6, top_k=2500, top_p=0.7),
    Filters(temperature=0.5, top_p=0.99),
)


def logits_of_every_kind(vocab_size: int) -> dict[str, NDArray[np.float32]]:
    """Rows [V] float32: flat, peaked, with ties, with -inf, negative, far apart, close together."""
    rng = np.random.default_rng(0)
    normal = rng.normal(0, 1, vocab_size)
    masked = np.where(rng.random(vocab_size) < 0.9, -np.inf, 3 * normal)
    masked[0] = 1.0
    single = np.full(vocab_size, -np.inf)
    single[vocab_size // 3] = -2.0
    clustered = np.where(np.arange(vocab_size) < 100, 10.0, 0.0) + normal
    rows = {
        "normal": 3 * normal,
        "flat": 0.01 * normal,
        "narrow": 1000 + 1e-3 * normal,
        "peaked": 3 * normal + np.where(normal > 3, 20, 0),
        "one of all": np.where(np.arange(vocab_size) == vocab_size - 1, 30.0, normal),
        "equal": np.full(vocab_size, 1.5),
        "zeros of both signs": np.where(normal > 0, 0.0, -0.0),
        "whole numbers": np.round(2 * normal),
        "bfloat16": (3 * normal).astype(ml_dtypes.bfloat16),
        "masked": masked,
        "all but one masked": single,
        "lowest floats": np.where(normal > 1, 2 * normal, np.finfo(np.float32).min),
        "negative": 2 * normal - 50,
        "tiny": 1e-30 * normal,
        "neighbours": clustered,
        "sorted": np.sort(4 * normal),
        "exponential": rng.exponential(2, vocab_size),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


def every_case(vocab_size: int) -> list[tuple[str, NDArray[np.float32], Filters]]:
    """Every kind of row with every filter."""
    kinds = logits_of_every_kind(vocab_size).items()
    return [(name, row, each) for (name, row), each in product(kinds, FILTERS)]


def columns(filters: list[Filters], vocab_size: int) -> tuple[NDArray[np.generic], ...]:
    """The filters as arrays [R], in the order that `truncation_thresholds` takes them."""
    temperature, top_k, top_p, min_p = zip(*filters, strict=True)
    floats = [np.asarray(column, np.float32) for column in (temperature, top_p, min_p)]
    return floats[0], np.minimum(top_k, vocab_size).astype(np.int32), floats[1], floats[2]


def num_kept_by_sorting(logits: NDArray[np.float32], filters: Filters) -> tuple[int, int]:
    """The definition, in float64: how many of the highest logits are kept, ties included.

    As two bounds, which differ only where top-p or min-p fall on the edge of a token to within what
    sums in float32 can tell.
    """
    bounds = []
    for slack in (-4e-6, 4e-6):
        ordered = np.sort(logits.astype(np.float64))[::-1]
        weights = np.exp((ordered - ordered[0]) / filters.temperature)
        kept = (weights >= filters.min_p * (1 - slack)) | (ordered == ordered[0])
        if filters.top_k < len(ordered):
            kept &= ordered >= ordered[filters.top_k - 1]
        if filters.top_p < 1:
            before = np.cumsum(weights * kept) - weights * kept
            inside = before < min(filters.top_p * (1 + slack), 1) * (weights * kept).sum()
            kept &= ordered >= ordered[np.flatnonzero(inside & kept)[-1]]
        bounds.append(int(kept.sum()))
    return bounds[0], bounds[1]
