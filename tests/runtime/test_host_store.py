"""Pages on their way to the host and back: in any number and order they are what they were."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.cache import KV_DTYPES, CacheSpec, PagedKVCache, PageStack, read_pages, write_pages
from paged.host_pages import STACK_SIZE, PageMove
from paged.runtime.host_store import HostStore, _at_once, _together
from paged.runtime.placement import ONE_DEVICE
from paged.runtime.steps import MOVE_SHAPES, MOVE_SIZES, MOVES_AT_ONCE

NUM_PAGES, NUM_HOST_PAGES = 90, 7 * STACK_SIZE


@pytest.fixture(scope="module")
def programs() -> dict[Any, Any]:
    read, write = jax.jit(read_pages), jax.jit(write_pages, donate_argnums=0)
    return {
        (name, *shape): program
        for shape in MOVE_SHAPES
        for name, program in (("read_pages", read), ("write_pages", write))
    }


def store_of(spec: CacheSpec, programs: dict[Any, Any]) -> tuple[HostStore, PagedKVCache]:
    """A store, and a cache whose pages each hold their own number."""
    cache = PagedKVCache.zeros(spec)
    cache = jax.tree.map(
        lambda x: x + jnp.arange(NUM_PAGES, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1)), cache
    )
    shapes: Any = SimpleNamespace(
        cache=spec, transit_room=64, num_host_pages=NUM_HOST_PAGES, placement=ONE_DEVICE
    )
    made: Any = programs
    return HostStore(shapes, made, cache.layers[0].values.sharding), cache


def contents(cache: PagedKVCache) -> list[set[float]]:
    """What each page holds, of each array."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(cache)]
    return [{float(x) for leaf in leaves for x in np.unique(leaf[page])} for page in range(90)]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_are_what_they_were(dtype: str, programs: dict[Any, Any]) -> None:
    """Moves to the host and back, some hundred at a time, against a list of what is where."""
    spec = CacheSpec(2, NUM_PAGES, 4, 2, 4, KV_DTYPES[dtype])
    store, cache = store_of(spec, programs)
    draw = random.Random(0)
    pages: list[float] = list(map(float, range(NUM_PAGES)))
    host: dict[int, float] = {}
    told: list[bytes] = []
    store.on_save = lambda hashes, stack: told.extend(hashes)
    for number in range(6):
        moves: list[PageMove] = []
        for _ in range(4):
            first, count = draw.randrange(NUM_HOST_PAGES), draw.choice((1, 3, 16, 70))
            for host_page in range(first, min(first + count, NUM_HOST_PAGES)):
                page = draw.randrange(NUM_PAGES)
                moves.append(PageMove(page, host_page, True, b"%d" % len(moves)))
                host[host_page] = pages[page]
            for _ in range(draw.choice((1, 40, 80))):
                page, host_page = draw.randrange(NUM_PAGES), draw.choice(sorted(host))
                moves.append(PageMove(page, host_page, False, b""))
                pages[page] = host[host_page]
        told.clear()
        cache = store.move(cache, moves)
        assert contents(cache) == [{page} for page in pages], f"after {number + 1} rounds"
        assert told == [move.page_hash for move in moves if move.to_host]


def test_pages_from_elsewhere_are_loaded(programs: dict[Any, Any]) -> None:
    spec = CacheSpec(2, NUM_PAGES, 4, 2, 4, KV_DTYPES["float32"])
    store, cache = store_of(spec, programs)
    host_pages = list(range(11, 33))
    found = [(np.full((2, 4, 4, 4), 1000 + page, np.float32),) for page in host_pages]
    store.put(host_pages, found)
    moves = [PageMove(1 + number, page, False, b"") for number, page in enumerate(host_pages)]
    cache = store.move(cache, moves)
    assert contents(cache)[1:23] == [{1000.0 + page} for page in host_pages]
    assert contents(cache)[23] == {23.0}


def sizes(host_pages: Sequence[int]) -> list[int]:
    return list(map(len, _together(host_pages)))


def test_what_goes_together_is_of_one_stack_and_of_a_size_that_is_compiled() -> None:
    assert sizes(range(3 * STACK_SIZE)) == [STACK_SIZE] * 3
    assert sizes(range(STACK_SIZE - 6, STACK_SIZE + 5)) == [4, 1, 1, 4, 1]
    assert sizes([0, STACK_SIZE, 1]) == [1, 1, 1]
    assert sizes([]) == []
    assert MOVE_SIZES[0] == 1, "so that any number can be made up"


def test_the_largest_go_some_at_a_time() -> None:
    parts = list(_together(range(6 * STACK_SIZE + 5)))
    assert [len(each) for each in _at_once(parts)] == [MOVES_AT_ONCE, 1, 1, 1, 1]


def test_no_more_is_on_its_way_than_there_is_room_for(programs: dict[Any, Any]) -> None:
    spec = CacheSpec(2, NUM_PAGES, 4, 2, 4, KV_DTYPES["float32"])
    store, cache = store_of(spec, programs)
    kept: list[PageStack] = []
    store.on_save = lambda hashes, stack: kept.append(stack)
    store.move(cache, [PageMove(page, page, True, b"") for page in range(80)])
    assert store._num_moving == STACK_SIZE, "64 had arrived before the rest went"
    assert sum(len(stack[0]) for stack in kept) == 80
