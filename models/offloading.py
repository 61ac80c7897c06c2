"""Layers whose weights live in host memory and are copied to the device in each step.

A step computes a layer while the next one on the host is copied, so that no more than two of these
are on the device at a time: `NUM_COPIES`. Nothing else about a model changes: a layer is given the
same arrays, wherever they came from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax import struct
from jax import lax
from jax.sharding import SingleDeviceSharding

from paged.models.weights import PINNED

NUM_COPIES = 2
"""Layers of the host's that a step holds on the device at once."""


@struct.dataclass
class OnHost:
    """A layer on the host.

    Attributes:
        weights: its arrays (or their descriptions), in pinned host memory.
    """

    weights: Any


def put_on_host(specs: Any, layers: Iterable[int]) -> Any:
    """The description of a decoder of which some layers, by their index, live on the host."""
    chosen = frozenset(layers)

    def placed(index: int, layer: Any) -> Any:
        if index not in chosen:
            return layer
        return OnHost(jax.tree.map(lambda spec: replace(spec, on_host=True), layer))

    return replace(specs, layers=tuple(placed(*each) for each in enumerate(specs.layers)))


def host_shapes(shapes: Any, layers: Iterable[int], device: jax.Device) -> Any:
    """The shapes of a decoder's parameters, those of some layers as of a device's host's memory."""
    chosen, place = frozenset(layers), SingleDeviceSharding(device, memory_kind=PINNED)

    def shape_of(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    each = enumerate(shapes.layers)
    placed = (OnHost(jax.tree.map(shape_of, x)) if i in chosen else x for i, x in each)
    return replace(shapes, layers=tuple(placed))


def choose_layers(sizes: Sequence[int], wanted: int) -> frozenset[int]:
    """The fewest layers, evenly spread, that free so many bytes of the device; all may be too few.

    Spread, since the others are computed while one of these is copied.

    Args:
        sizes: bytes of each layer's weights.
    """
    for count in range(1, len(sizes) + 1):
        chosen = frozenset((2 * i + 1) * len(sizes) // (2 * count) for i in range(count))
        if freed(sizes, chosen) >= wanted:
            return chosen
    return frozenset(range(len(sizes)))


def freed(sizes: Sequence[int], layers: Iterable[int]) -> int:
    """Bytes of the device that layers free on the host, without those of their copies."""
    moved = sorted((sizes[index] for index in layers), reverse=True)
    return sum(moved[NUM_COPIES:])


class Layers:
    """Hands a model its layers one after the other, those on the host copied ahead.

    Used while a step is traced. What is copied next waits for the input of the layer on the host
    before it: without that the compiler would copy all of them first, and have no room for them.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._left = deque(layers)
        self._to_copy = deque(layer.weights for layer in layers if isinstance(layer, OnHost))
        self._copied: deque[Any] = deque()
        self._copy_next()

    def next(self, x: jax.Array) -> tuple[Any, jax.Array]:
        """The next layer's weights on the device, and its input x [T, D]."""
        layer = self._left.popleft()
        if not isinstance(layer, OnHost):
            return layer, x
        if self._to_copy:
            self._to_copy[0], x = lax.optimization_barrier((self._to_copy[0], x))
            self._copy_next()
        return self._copied.popleft(), x

    def _copy_next(self) -> None:
        if self._to_copy:
            self._copied.append(jax.device_put(self._to_copy.popleft(), jax.memory.Space.Device))
