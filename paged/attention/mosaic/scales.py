"""The scales of keys and values that pages hold as integers, each position's in a row.

They are too small to be copied page by page, and are read right into registers: where they stand
two spans ahead, and what they are one span ahead, so that no one waits for the device's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.attention.mosaic.words import ROW, gathered
from paged.kernels import Ref


class Spec(Protocol):
    """What a kernel's spec says of pages."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def pages_per_table(self) -> int: ...

    @property
    def interpreted(self) -> bool: ...


def in_one_line(scales: jax.Array | None, tables: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Scales of pages, if there are, and page tables as `ScaledSpans` reads them."""
    return None if scales is None else (scales.ravel(), tables.ravel())


class Ahead(NamedTuple):
    """What is read before its span's turn.

    Attributes:
        scales: [span], of the next span's keys and values, as pages hold them.
        pages: [span], of the positions of the span behind it.
    """

    scales: jax.Array
    pages: jax.Array


@dataclass(frozen=True)
class ScaledSpans:
    """The scales of one head of a sequence.

    Attributes:
        scales: [num_pages * page_size * Hkv], of all pages, see `paged.cache.Pages`.
        tables: [S * P], all page tables.
        slot: the sequence's page table.
        head: the key/value head.
        spec: of the kernel.
        span: positions.
    """

    scales: Ref
    tables: Ref
    slot: jax.Array
    head: jax.Array
    spec: Spec
    span: int

    def first(self, i: jax.Array) -> Ahead:
        """Of span i, where a kernel begins."""
        return Ahead(self._scales(i, self._pages(i)), self._pages(i + 1))

    def next(self, i: jax.Array, ahead: Ahead) -> tuple[jax.Array, Ahead]:
        """The scales of span i, and what is to be read meanwhile."""
        return ahead.scales, Ahead(self._scales(i + 1, ahead.pages), self._pages(i + 2))

    def _pages(self, i: jax.Array) -> jax.Array:
        # Behind the table's end any page will do: what lies behind the sequence's is masked.
        entry = lax.div(self._positions(i), jnp.int32(self.spec.page_size))
        entry = jnp.minimum(entry, self.spec.pages_per_table - 1)
        index = self.slot * self.spec.pages_per_table + entry
        return gathered(self.tables, index, interpreted=self.spec.interpreted)

    def _scales(self, i: jax.Array, pages: jax.Array) -> jax.Array:
        offset = lax.rem(self._positions(i), jnp.int32(self.spec.page_size))
        index = (pages * self.spec.page_size + offset) * self.spec.kv_heads + self.head
        return gathered(self.scales, index, interpreted=self.spec.interpreted)

    def _positions(self, i: jax.Array) -> jax.Array:
        return i * self.span + plgpu.broadcasted_iota(jnp.int32, (self.span,), 0, layout=ROW)


def of_keys(scales: jax.Array) -> jax.Array:
    """float32: a bfloat16 is the upper half of one."""
    return lax.bitcast_convert_type(scales << 16, jnp.float32)


def of_values(scales: jax.Array) -> jax.Array:
    """float32."""
    return lax.bitcast_convert_type(scales & jnp.uint32(0xFFFF0000), jnp.float32)


def by_rows(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each row, for the elements of a matrix."""
    return lax.broadcast_in_dim(column, shape, [0])
