"""Rows put in groups, and products of groups, run warpgroup by warpgroup in Pallas' interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.matmul import (
    ROW_UNIT,
    Groups,
    Order,
    Tiling,
    grouped_matmul,
    grouped_tiling_for,
    grouping,
    groups,
    in_groups,
    in_groups_at_once,
    supports_groups,
    tiling,
)
from paged.matmul.estimate import grouped_tilings
from paged.matmul.groups import work_list
from paged.matmul.tiling import ROWS
from paged.matmul.tuned import GROUPED

ONE = Tiling(row_warpgroups=1, widths=(64,))
TWO = Tiling(widths=(128,))
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that each has several tiles."""
    monkeypatch.setattr(tiling, "MULTIPROCESSORS", 4)


def check_order(order: Order, owners: np.ndarray, num_groups: int, unit: int) -> None:
    sizes, places = np.asarray(order.groups.sizes), np.asarray(order.places)
    counts = np.bincount(owners, minlength=num_groups + 1)[:num_groups]
    assert np.array_equal(sizes, -(-counts // unit) * unit)
    assert np.array_equal(order.groups.ends, np.cumsum(sizes))
    assert sizes.sum() <= len(order.rows)
    assert len(order.rows) % unit == 0
    starts = np.cumsum(sizes) - sizes
    for group, start in enumerate(starts):
        assert np.array_equal(places[owners == group], start + np.arange(counts[group]))
    assert (places[owners == num_groups] == len(order.rows)).all()
    placed = owners < num_groups
    assert np.array_equal(np.asarray(order.rows)[places[placed]], np.flatnonzero(placed))


ROWS_AND_GROUPS = [(1, 4), (40, 6), (100, 128), (77, 3), (64, 5), (512, 60)]


@pytest.mark.parametrize("compared", [16, 512])
@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize(("rows", "num_groups"), ROWS_AND_GROUPS)
def test_rows_stand_in_their_groups_in_their_order(
    rows: int, num_groups: int, unit: int, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_COMPARED", compared)
    owners = np.random.default_rng(rows).integers(0, num_groups + 1, rows)
    order = in_groups(jnp.asarray(owners, jnp.int32), num_groups, most=rows, unit=unit)
    check_order(order, owners, num_groups, unit)
    sizes = np.asarray(order.groups.sizes)
    whose = np.asarray(order.groups.owners(len(order.rows)))
    assert np.array_equal(whose[: sizes.sum()], np.repeat(np.arange(num_groups), sizes))


@pytest.mark.parametrize("compared", [64, 8192])
@pytest.mark.parametrize(("rows", "num_groups"), ROWS_AND_GROUPS)
def test_one_kernel_puts_them_there_too(
    rows: int, num_groups: int, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "_COMPARED", compared)
    owners = np.random.default_rng(rows).integers(0, num_groups + 1, rows)
    given = jnp.asarray(owners, jnp.int32)
    order = in_groups_at_once(given, num_groups, most=rows, interpret=True)
    check_order(order, owners, num_groups, ROW_UNIT)
    work = order.groups.work
    assert work is not None
    expected = work_list(replace(order.groups, work=None), len(order.rows), ROWS)
    assert np.array_equal(work.ends, expected.ends)
    assert np.array_equal(work.groups, expected.groups)


def test_the_work_list_has_all_tiles_in_their_order() -> None:
    sizes = [8, 0, 200, 64, 0, 72]
    work = work_list(Groups.of(jnp.asarray(sizes, jnp.int32), 200), sum(sizes), 64)
    assert work.groups.tolist()[:8] == [0, 2, 2, 2, 2, 3, 5, 5]
    assert work.ends.tolist() == [1, 1, 5, 6, 6, 8]


def check(
    sizes: Sequence[int], k: int, n: int, how: Tiling, *, gated: bool = False, others: int = 0
) -> None:
    """Products of random numbers against the same in float32; `others` rows are nobody's."""
    rows, keys = sum(sizes), jax.random.split(jax.random.key(k + n), 2)
    x = jax.random.normal(keys[0], (rows + others, k), "bfloat16")
    shape = (len(sizes), k, 2, n) if gated else (len(sizes), k, n)
    w = (jax.random.normal(keys[1], shape) / k**0.5).astype("bfloat16")
    given = Groups.of(jnp.asarray(sizes, jnp.int32), max(8, *sizes))
    found = grouped_matmul(x, w, given, how, interpret=plgpu.InterpretGPUParams())
    assert found.dtype == x.dtype
    assert found.shape == (rows + others, n)
    whose = np.repeat(np.arange(len(sizes)), sizes)
    exact = jnp.einsum("mk,mk...->m...", x[:rows], w[whose], preferred_element_type=jnp.float32)
    exact = jax.nn.silu(exact[:, 0]) * exact[:, 1] if gated else exact
    tolerance = 2 * float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(found[:rows].astype("float32"), exact, rtol=tolerance, atol=1e-3)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [[8, 0, 72, 8, 200, 0], [0, 136], [0, 0], [8, 8, 8, 8, 8]],
    ids=["ragged", "all-to-one", "no-rows", "one-unit-each"],
)
def test_each_group_is_multiplied_by_its_weight(sizes: list[int], gated: bool) -> None:
    check(sizes, 128, 192, TWO, gated=gated, others=16)


def test_few_rows() -> None:
    check([8, 0, 16, 8], 128, 128, ONE, others=8)


def test_parts_of_k_are_summed() -> None:
    check([8, 0, 136, 8], 256, 192, replace(ONE, splits=2))


def test_columns_beyond_the_last_are_not_written() -> None:
    check([16, 72], 64, 64, replace(TWO, widths=(256,), column_cluster=2))


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [8, 4096])
def test_tilings(rows: int, gated: bool) -> None:
    for how in grouped_tilings(rows, 4, 128, 192, gated=gated):
        check([8, 0, 264, 64], 128, 192, how, gated=gated, others=8)


def test_what_the_kernel_cannot_do_is_refused() -> None:
    def takes(*shape: int, dtype: str = "bfloat16") -> bool:
        return supports_groups(jnp.dtype(dtype), jax.ShapeDtypeStruct(shape, dtype))

    assert takes(4, 128, 64)
    assert takes(4, 128, 2, 64)
    assert not takes(4, 96, 64)
    assert not takes(4, 128, 64, dtype="float32")
    x, w = jnp.zeros((12, 128), jnp.bfloat16), jnp.zeros((2, 128, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        grouped_matmul(x, w, Groups.of(jnp.asarray([8, 0]), 8), ONE)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [8, 512, 8192, 131072])
@pytest.mark.parametrize(
    ("num_groups", "k", "n"), [(8, 4096, 14336), (128, 768, 2048), (32, 2880, 2880), (4, 64, 64)]
)
def test_there_is_a_tiling(num_groups: int, k: int, n: int, rows: int, gated: bool) -> None:
    how = grouped_tiling_for(rows, num_groups, k, n, device_kind=H100, gated=gated)
    assert k % (how.depth * how.splits) == 0
    assert how.row_cluster == 1


def test_what_was_measured_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Tiling(widths=(192,))
    monkeypatch.setitem(GROUPED[H200], (False, 4, 128, 192), ((8, ONE), (64, own)))
    for rows, expected in ((8, ONE), (16, own), (1000, own)):
        assert grouped_tiling_for(rows, 4, 128, 192, device_kind=H100) == expected
