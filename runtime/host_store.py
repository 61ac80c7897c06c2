"""Host pages: what they hold, and the way there and back.

Pages that go together are read into one array on the device, which is copied to pinned memory in
one transfer while the next steps run; each array costs the engine's thread about as much as its
bytes cost the bus. Nothing writes to such an array again, so nobody has to wait for anybody: pages
that are loaded before their copy has arrived come when it has. Only if more is on its way than the
device has room for does a move wait for earlier ones.

An array never holds pages of two stacks of `HostPages`, and is let go when its stack was filled
anew: so host memory holds little more than what is counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from paged.cache import PagedKVCache, PageStack
from paged.host_pages import STACK_SIZE, PageMove
from paged.models.weights import PINNED
from paged.pool import NULL_PAGE
from paged.runtime.errors import ConfigError
from paged.runtime.memory import size_text
from paged.runtime.programs import Programs
from paged.runtime.steps import MOVE_SHAPES, MOVE_SIZES, MOVES_AT_ONCE, StepShapes

_RESERVED_AT_ONCE = 2**30
_REPEATS = 5


class _Place(NamedTuple):
    """Where the content of a host page is."""

    stack: PageStack
    row: int


class _Load(NamedTuple):
    """Rows of a stack, and the pages that they are written to."""

    stack: PageStack
    targets: dict[int, int]

    @property
    def size(self) -> int:
        return len(self.stack[0])


class HostStore:
    """Holds the content of host pages; moves are enqueued like steps.

    Attributes:
        on_save: told the hashes and the content of pages that go to the host.
    """

    def __init__(self, shapes: StepShapes, programs: Programs, sharding: Sharding) -> None:
        """Take the memory.

        Args:
            sharding: of the pages, if they are all on one device.
        """
        self._programs = programs
        self._num_pages = shapes.cache.num_pages
        self._room = shapes.transit_room
        self._device = shapes.placement.spread_stacks or sharding
        self._host = self._device.with_memory_kind(PINNED)
        self._places: dict[int, _Place] = {}
        self._in_transit: deque[tuple[int, jax.Array]] = deque()
        self._num_moving = 0
        self.on_save: Callable[[Sequence[bytes], PageStack], None] = lambda hashes, stack: None
        self._copied = shapes.placement.copied_to(PINNED) or self._host
        if jax.default_backend() != "cpu":
            self._reserve(
                shapes.num_host_pages * shapes.cache.bytes_per_page,
                shapes.placement.num_devices,
            )

    def move(self, cache: PagedKVCache, moves: Sequence[PageMove]) -> PagedKVCache:
        """Enqueue moves, in their order. The cache is donated."""
        for to_host, alike in groupby(moves, key=lambda move: move.to_host):
            if to_host:
                self._save(cache, list(alike))
            else:
                cache = self._load(cache, list(alike))
        return cache

    def put(self, host_pages: Sequence[int], contents: Sequence[tuple[NDArray[Any], ...]]) -> None:
        """Fill host pages from elsewhere."""
        for pages in _together(host_pages):
            part, contents = contents[: len(pages)], contents[len(pages) :]
            self.keep(pages, self.stack([np.stack(each) for each in zip(*part, strict=True)]))

    def stack(self, parts: Sequence[NDArray[Any]]) -> PageStack:
        """Take the content of pages from elsewhere, to be kept; for any thread.

        Args:
            parts: [N, layers, page_size, ..] each, for an N of `MOVE_SIZES`; not to be changed.
        """
        stack: PageStack = jax.device_put(tuple(parts), self._host)
        return stack

    def keep(self, host_pages: Sequence[int | None], stack: PageStack) -> None:
        """Fill host pages with the rows of a stack; a row without one is dropped."""
        for row, page in enumerate(host_pages):
            if page is not None:
                self._places[page] = _Place(stack, row)

    def read(self, cache: PagedKVCache, pages: Sequence[int]) -> Iterator[PageStack]:
        """What pages hold after the steps that are enqueued, on its way to the host."""
        start = 0
        while start < len(pages):
            size = max(size for size in MOVE_SIZES if size <= len(pages) - start)
            self._make_room(size)
            source = np.array([pages[start : start + size]], np.int32)
            [stack] = self._read(cache, source)
            self._send(size, stack[-1])
            yield stack
            start += size

    def time_loads(self, cache: PagedKVCache) -> tuple[PagedKVCache, list[float]]:
        """Seconds to load 1 page, and as many as go at once. The cache is donated."""
        seconds = []
        for shape in (MOVE_SHAPES[0], MOVE_SHAPES[-1]):
            kept = jax.block_until_ready(self._read(cache, np.full(shape, NULL_PAGE, np.int32)))
            times = []
            for _ in range(_REPEATS):
                started = time.perf_counter()
                cache, done = self._write(cache, [_Load(stack, {}) for stack in kept])
                done.block_until_ready()
                times.append(time.perf_counter() - started)
            seconds.append(min(times))
        return cache, seconds

    def close(self) -> None:
        """Give the memory back."""
        self._places.clear()
        self._in_transit.clear()

    def _save(self, cache: PagedKVCache, moves: list[PageMove]) -> None:
        for parts in _at_once([*_together([move.host_page for move in moves])]):
            count, size = len(parts), len(parts[0])
            taken, moves = moves[: count * size], moves[count * size :]
            self._make_room(len(taken))
            source = np.array([move.page for move in taken], np.int32).reshape(count, size)
            stacks = self._read(cache, source)
            hashes = [move.page_hash for move in taken]
            for number, (host_pages, stack) in enumerate(zip(parts, stacks, strict=True)):
                self.keep(host_pages, stack)
                self.on_save(hashes[number * size :][:size], stack)
            self._send(len(taken), stacks[-1][-1])

    def _load(self, cache: PagedKVCache, moves: list[PageMove]) -> PagedKVCache:
        # Of two loads into a page, for a sequence that came and went meanwhile, the later counts.
        sources = {move.page: self._places[move.host_page] for move in moves}
        for parts in _at_once(sorted(_loads(sources), key=_size_of)):
            size = len(parts) * _size_of(parts[0])
            self._make_room(size)
            cache, done = self._write(cache, parts)
            self._send(size, done)
        return cache

    def _read(self, cache: PagedKVCache, source: NDArray[np.int32]) -> tuple[PageStack, ...]:
        """What pages hold, on its way to the host: a stack for each row of them."""
        stacks = self._programs["read_pages", *source.shape](cache, source)
        kept: tuple[PageStack, ...] = jax.device_put(stacks, self._host)
        return kept

    def _write(self, cache: PagedKVCache, loads: Sequence[_Load]) -> tuple[PagedKVCache, jax.Array]:
        """Write rows of stacks of one size to pages; the others are transferred and dropped."""
        shape = len(loads), loads[0].size
        # Padding targets lie beyond the pages and differ.
        beyond = self._num_pages + np.arange(shape[0] * shape[1], dtype=np.int32)
        target: NDArray[np.int32] = beyond.reshape(shape)
        for number, load in enumerate(loads):
            for row, page in load.targets.items():
                target[number, row] = page
        sent = jax.device_put(tuple(load.stack for load in loads), self._device)
        written: tuple[PagedKVCache, jax.Array]
        written = self._programs["write_pages", *shape](cache, target, sent)
        return written

    def _make_room(self, count: int) -> None:
        """Wait until so many pages more may be on their way, if those before have not arrived."""
        while self._in_transit and self._num_moving + count > self._room:
            num_arrived, done = self._in_transit.popleft()
            done.block_until_ready()
            self._num_moving -= num_arrived

    def _send(self, count: int, done: jax.Array) -> None:
        """Take note of pages that are on their way until `done` is there."""
        self._in_transit.append((count, done))
        self._num_moving += count

    def _reserve(self, num_bytes: int, num_devices: int) -> None:
        """Have so much memory pinned for each device now, which takes long; allocators keep it.

        Raises:
            ConfigError: it cannot be had.
        """
        nothing = np.zeros(_RESERVED_AT_ONCE, np.uint8)
        times = ceil(num_bytes / _RESERVED_AT_ONCE)
        try:
            jax.block_until_ready([jax.device_put(nothing, self._copied) for _ in range(times)])
        except jax.errors.JaxRuntimeError as error:
            wanted = size_text(num_bytes * num_devices)
            raise ConfigError(
                f"--kv-offloading-size is {wanted}, which cannot be had as pinned memory: {error}. "
                "Give less, or raise XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB."
            ) from error


def _together(host_pages: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut a list into what moves as one array: of one stack, and as many as a program takes."""
    start = 0
    while start < len(host_pages):
        stack = host_pages[start] // STACK_SIZE
        most = [page // STACK_SIZE == stack for page in host_pages[start : start + MOVE_SIZES[-1]]]
        count = most.index(False) if False in most else len(most)
        count = max(size for size in MOVE_SIZES if size <= count)
        yield host_pages[start : start + count]
        start += count


def _loads(sources: dict[int, _Place]) -> list[_Load]:
    """What is to be loaded into pages, stack by stack."""
    loads: list[_Load] = []
    last: dict[int, _Load] = {}
    for page, (stack, row) in sources.items():
        load = last.get(id(stack))
        if load is None or row in load.targets:  # a row goes to one page at a time
            load = last[id(stack)] = _Load(stack, {})
            loads.append(load)
        load.targets[row] = page
    return loads


def _at_once[T: Sequence[int] | _Load](parts: list[T]) -> Iterator[list[T]]:
    """Cut a list into what moves in one call: one part, or some of the largest size."""
    for size, alike in groupby(parts, key=_size_of):
        left = list(alike)
        most = MOVES_AT_ONCE if size == STACK_SIZE else 1
        while left:
            count = most if len(left) >= most else 1
            yield left[:count]
            left = left[count:]


def _size_of(part: Sequence[int] | _Load) -> int:
    """Pages in it."""
    return part.size if isinstance(part, _Load) else len(part)
