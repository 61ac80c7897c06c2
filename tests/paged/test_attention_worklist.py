"""The list by which decode programs share their work, against its rules, for odd batches."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from paged.attention.mosaic.worklist import SPAN, WHOLE, Item, WorkList, part_of, work_list

Ints = npt.NDArray[np.int32]


def batches(num_rows: int) -> Iterator[Ints]:
    """Lengths [num_rows] of rows: of all magnitudes, with holes, and with padding behind."""
    rng = np.random.default_rng(num_rows)
    yield np.zeros(num_rows, np.int32)
    yield np.ones(num_rows, np.int32)
    yield np.full(num_rows, 1024, np.int32)
    yield np.arange(num_rows, dtype=np.int32) + SPAN - 1
    for limit in (2, SPAN, SPAN + 1, 300, 5000):
        for _ in range(4):
            lengths = rng.integers(0, limit, num_rows, endpoint=True, dtype=np.int32)
            lengths[rng.random(num_rows) < rng.random()] = 0
            lengths[rng.integers(num_rows)] = rng.integers(20_000)
            lengths[rng.integers(num_rows + 1) :] = 0
            yield lengths


def check_shares(work: WorkList, spans: int, programs: int) -> None:
    """No program has more than an equal share of the spans, rounded up, and items have some."""
    begin, end = work.items[:, 2], work.items[:, 3]
    for since, until in pairwise(work.first_item):
        assert since <= until
        counts = -(-end[since:until] // SPAN) - begin[since:until] // SPAN
        assert (counts > 0).all()
        assert counts.sum() <= -(-spans // programs)


def items_of_rows(work: WorkList, num_rows: int) -> list[list[tuple[int, Item]]]:
    """For each row its items, with the program of each."""
    rows: list[list[tuple[int, Item]]] = [[] for _ in range(num_rows)]
    for program, (since, until) in enumerate(pairwise(work.first_item)):
        for item in (Item(*fields) for fields in work.items[since:until]):
            rows[int(item.row)].append((program, item))
    return rows


def check_row(items: list[tuple[int, Item]], begin: int, end: int, cuts: list[list[int]]) -> None:
    """The items cover the row, in order, each but the last up to the end of a span, and those that
    are parts are where a merge looks for them."""
    for program, item in items:
        assert item.begin == begin
        assert item.begins_row(jnp.int32(program)) == (item is items[0][1])
        begin = int(item.end)
        assert begin == end or begin % SPAN == 0
    assert begin == end or not items
    parts = [int(item.part) for _, item in items]
    if len(items) > 1:
        (first, num_parts), programs = cuts.pop(0), [program for program, _ in items]
        assert num_parts == len(items)
        assert programs == list(range(first, first + num_parts))
        assert parts == [part_of(jnp.int32(first + k), k == 0) for k in range(num_parts)]
    else:
        assert parts == [WHOLE] * len(items)


def check_list(work: WorkList, lengths: Ints, slots: Ints, window: int | None) -> None:
    begins = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    spans = int((-(-lengths // SPAN) - begins // SPAN).sum())
    check_shares(work, spans, len(work.cuts))

    of_rows = items_of_rows(work, len(lengths))
    cuts = [[program, int(n)] for program, (_, n) in enumerate(work.cuts) if n]
    cut = [int(row) for row, n in work.cuts if n]
    assert cut == [row for row, items in enumerate(of_rows) if len(items) > 1]
    for row, items in enumerate(of_rows):
        assert bool(items) == bool(lengths[row])
        assert all(item.table == slots[row] for _, item in items)
        check_row(items, int(begins[row]), int(lengths[row]), cuts)


@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("programs", [1, 5, 33, 264])
def test_every_position_is_read_once(num_rows: int, window: int | None, programs: int) -> None:
    slots = np.random.default_rng(0).permutation(num_rows + 3)[:num_rows].astype(np.int32)
    compiled = jax.jit(functools.partial(work_list, window=window, programs=programs))
    for lengths in batches(num_rows):
        check_list(jax.tree.map(np.asarray, compiled(lengths, slots)), lengths, slots, window)
