"""Thresholds keep exactly what sorting keeps: the kernels, interpreted, and plain XLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from paged.truncation import truncation_thresholds
from paged.truncation.reference import thresholds_reference
from paged.truncation.triton import thresholds_triton
from tests.paged.truncations import Filters, columns, every_case, num_kept_by_sorting

# What replaces this backend is not as fast yet.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

Thresholds = Callable[..., jax.Array]
IMPLEMENTATIONS = [
    pytest.param(thresholds_reference, id="reference"),
    pytest.param(partial(thresholds_triton, interpret=True), id="kernels"),
]


def thresholds(
    implementation: Thresholds, rows: list[NDArray[np.float32]], filters: list[Filters]
) -> NDArray[np.float32]:
    logits = np.stack(rows)
    return np.asarray(jax.jit(implementation)(logits, *columns(filters, logits.shape[1])))


def check_all(implementation: Thresholds, vocab_size: int) -> None:
    cases = every_case(vocab_size)
    rows = [row for _, row, _ in cases]
    found = thresholds(implementation, rows, [each for *_, each in cases])
    # Compared where they will be: a CPU may take the smallest numbers for zero there.
    kept = jnp.sum(jnp.stack(rows) >= found[:, None], axis=1).tolist()
    wrong = []
    for (name, row, filters), num_kept in zip(cases, kept, strict=True):
        fewest, most = num_kept_by_sorting(row, filters)
        if not fewest <= num_kept <= most:
            wrong.append((name, filters, num_kept, fewest, most))
    assert wrong == []


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("vocab_size", [1, 97, 3001])
def test_what_is_kept_is_what_sorting_keeps(implementation: Thresholds, vocab_size: int) -> None:
    check_all(implementation, vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_kept_of_a_large_vocabulary(implementation: Thresholds) -> None:
    check_all(implementation, 32064)


@pytest.mark.gpu
def test_what_is_kept_on_a_gpu() -> None:
    check_all(truncation_thresholds, 128256)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_thresholds_do_not_depend_on_the_neighbours(implementation: Thresholds) -> None:
    cases = every_case(3001)[::7]
    rows, filters = [row for _, row, _ in cases], [each for *_, each in cases]
    together = thresholds(implementation, rows, filters)
    for i in range(0, len(cases), 9):
        alone = thresholds(implementation, rows[i : i + 1], filters[i : i + 1])
        assert alone.tobytes() == together[i : i + 1].tobytes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_nonsense_end(implementation: Thresholds) -> None:
    """Whatever a broken model says, the search comes to an end."""
    kinds = [np.full(300, value, np.float32) for value in (np.nan, np.inf, -np.inf)]
    mixed = np.random.default_rng(0).normal(0, 1, 300).astype(np.float32)
    mixed[::7], mixed[::11] = np.nan, np.inf
    filters = [Filters(top_k=20, top_p=0.9, min_p=0.1)] * 4
    assert thresholds(implementation, [*kinds, mixed], filters).shape == (4,)


def test_a_cpu_takes_the_reference() -> None:
    case = [np.arange(64, dtype=np.float32)], [Filters(top_k=9)]
    text = jax.jit(truncation_thresholds).lower(jnp.stack(case[0]), *columns(case[1], 64)).as_text()
    assert "paged_threshold" not in text
