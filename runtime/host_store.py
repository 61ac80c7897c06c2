"""Host pages: what they hold, and the way there and back.

What a host page holds is an array in pinned memory that nothing writes to again, so that nobody has
to wait for anybody: a page is read into an array of its own and copied from there while the next
steps run, and one that is loaded before its copy has arrived comes when it has. Only if more is on
its way than the device has room for does a move wait for earlier ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from paged.cache import PageContent, PagedKVCache
from paged.host_pages import PageMove
from paged.pool import NULL_PAGE
from paged.runtime.errors import ConfigError
from paged.runtime.memory import size_text
from paged.runtime.programs import Programs
from paged.runtime.steps import MOVE_SIZES, StepShapes

_RESERVED_AT_ONCE = 2**30
_REPEATS = 5


class HostStore:
    """Holds the content of host pages; moves are enqueued like steps.

    Attributes:
        on_save: told the hash and the content of each page that goes to the host.
    """

    def __init__(self, shapes: StepShapes, programs: Programs, sharding: Sharding) -> None:
        """Take the memory.

        Args:
            sharding: of the pages on the device.
        """
        self._programs = programs
        self._num_pages = shapes.cache.num_pages
        self._room = shapes.transit_room
        self._device = sharding
        self._host = sharding.with_memory_kind("pinned_host")
        self._contents: list[PageContent] = [()] * shapes.num_host_pages
        self._in_transit: deque[tuple[int, jax.Array]] = deque()
        self._num_moving = 0
        self.on_save: Callable[[bytes, PageContent], None] = lambda page_hash, content: None
        self._copied = shapes.placement.copied_to("pinned_host") or self._host
        if jax.default_backend() != "cpu":
            self._reserve(
                shapes.num_host_pages * shapes.cache.bytes_per_page,
                shapes.placement.num_devices,
            )

    def move(self, cache: PagedKVCache, moves: Sequence[PageMove]) -> PagedKVCache:
        """Enqueue moves, in their order. The cache is donated."""
        for to_host, alike in groupby(moves, key=lambda move: move.to_host):
            for part in _parts(list(alike)):
                self._make_room(len(part))
                if to_host:
                    self._save(cache, part)
                else:
                    cache = self._load(cache, part)
        return cache

    def put(self, host_page: int, content: tuple[NDArray[Any], ...]) -> None:
        """Fill a host page from elsewhere."""
        self._contents[host_page] = jax.device_put(content, self._host)

    def time_loads(self, cache: PagedKVCache) -> tuple[PagedKVCache, list[float]]:
        """Seconds to load 1 page, and as many as go at once. The cache is donated."""
        seconds = []
        for count in (1, MOVE_SIZES[-1]):
            read = self._read(cache, [NULL_PAGE] * count)
            contents = list(jax.block_until_ready(jax.device_put(read, self._host)))
            times = []
            for _ in range(_REPEATS):
                started = time.perf_counter()
                cache, done = self._write(cache, [], contents)
                done.block_until_ready()
                times.append(time.perf_counter() - started)
            seconds.append(min(times))
        return cache, seconds

    def close(self) -> None:
        """Give the memory back."""
        self._contents = []
        self._in_transit.clear()

    def _save(self, cache: PagedKVCache, moves: list[PageMove]) -> None:
        read = self._read(cache, [move.page for move in moves])
        kept = jax.device_put(read, self._host)
        for move, content in zip(moves, kept, strict=True):
            self._contents[move.host_page] = content
            self.on_save(move.page_hash, content)
        self._send(len(moves), kept[-1][-1])

    def _load(self, cache: PagedKVCache, moves: list[PageMove]) -> PagedKVCache:
        contents = [self._contents[move.host_page] for move in moves]
        cache, done = self._write(cache, [move.page for move in moves], contents)
        self._send(len(moves), done)
        return cache

    def _read(self, cache: PagedKVCache, pages: list[int]) -> tuple[PageContent, ...]:
        size = _size(len(pages))
        source = np.full(size, NULL_PAGE, np.int32)
        source[: len(pages)] = pages
        contents: tuple[PageContent, ...] = self._programs["read_pages", size](cache, source)
        return contents[: len(pages)]

    def _write(
        self, cache: PagedKVCache, pages: list[int], contents: list[PageContent]
    ) -> tuple[PagedKVCache, jax.Array]:
        """Write contents to pages; those beyond them are transferred and dropped."""
        size = _size(len(contents))
        # Padding targets lie beyond the pages and differ.
        target: NDArray[np.int32] = self._num_pages + np.arange(size, dtype=np.int32)
        target[: len(pages)] = pages
        sent = jax.device_put(contents, self._device)
        padded = (*sent, *[sent[0]] * (size - len(sent)))
        written: tuple[PagedKVCache, jax.Array]
        written = self._programs["write_pages", size](cache, target, padded)
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


def _size(count: int) -> int:
    """The smallest program that takes so many pages."""
    return next(size for size in MOVE_SIZES if size >= count)


def _parts(moves: list[PageMove]) -> Iterator[list[PageMove]]:
    most = MOVE_SIZES[-1]
    for start in range(0, len(moves), most):
        yield moves[start : start + most]
