"""The kernel for rows in groups, compiled and run on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.matmul import (
    ROW_UNIT,
    Groups,
    Tiling,
    available,
    grouped_matmul,
    in_groups,
    in_groups_at_once,
)
from paged.matmul.estimate import grouped_tilings
from paged.matmul.groups import work_list
from paged.matmul.tiling import ROWS

pytestmark = [
    pytest.mark.gpu,
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not available(jax.devices()[0]):
        pytest.skip("needs a Hopper GPU")


def check(sizes: Sequence[int], k: int, n: int, how: Tiling, gated: bool) -> None:
    """Random numbers; what lies beyond the last group's rows must not matter."""
    rng, rows = np.random.default_rng(sum(sizes)), sum(sizes)
    x = jnp.asarray(rng.normal(size=(rows + 16, k)), "bfloat16").at[rows:].set(jnp.nan)
    shape = (len(sizes), k, 2, n) if gated else (len(sizes), k, n)
    w = jnp.asarray(rng.normal(size=shape) / k**0.5, "bfloat16")
    groups = Groups.of(jnp.asarray(sizes, jnp.int32), max(8, *sizes))
    found = jax.jit(lambda x, w, groups: grouped_matmul(x, w, groups, how))(x, w, groups)
    ends = np.cumsum(sizes)
    wide, weights = np.asarray(x, np.float64), np.asarray(w, np.float64)
    parts = [
        np.tensordot(wide[end - size : end], weight, 1)
        for size, end, weight in zip(sizes, ends, weights, strict=True)
    ]
    exact = np.concatenate(parts)
    if gated:
        exact = exact[:, 0] / (1 + np.exp(-exact[:, 0])) * exact[:, 1]
    error = np.abs(np.asarray(found, np.float64)[:rows] - exact)
    assert (error < 0.01 * np.abs(exact) + 1e-2).all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [8, 4096])
@pytest.mark.parametrize(("k", "n"), [(512, 448), (2880, 2880)])
@pytest.mark.parametrize(
    "sizes",
    [[8, 0, 16, 64, 0, 200], [0, 0, 8], [0, 1000, 0], [72] * 8, [0, 0]],
    ids=["ragged", "one-token", "all-to-one", "alike", "no-rows"],
)
def test_groups(sizes: list[int], k: int, n: int, rows: int, gated: bool) -> None:
    for how in grouped_tilings(rows, len(sizes), k, n, gated=gated)[:3]:
        check(sizes, k, n, how, gated)


@pytest.mark.parametrize(("rows", "num_groups"), [(1, 4), (8, 128), (77, 3), (512, 60)])
def test_one_kernel_puts_rows_in_the_groups_that_xla_does(rows: int, num_groups: int) -> None:
    owners = np.random.default_rng(rows).integers(0, num_groups + 1, rows)
    given = jnp.asarray(owners, jnp.int32)
    found = in_groups_at_once(given, num_groups, most=rows)
    expected = in_groups(given, num_groups, most=rows, unit=ROW_UNIT)
    assert np.array_equal(found.places, expected.places)
    assert np.array_equal(found.groups.sizes, expected.groups.sizes)
    assert np.array_equal(found.groups.ends, expected.groups.ends)
    places = np.asarray(found.places)[owners < num_groups]
    assert np.array_equal(found.rows[places], np.flatnonzero(owners < num_groups))
    work = work_list(expected.groups, len(expected.rows), ROWS)
    assert found.groups.work is not None
    assert np.array_equal(found.groups.work.ends, work.ends)
    assert np.array_equal(found.groups.work.groups, work.groups)
