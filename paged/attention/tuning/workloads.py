"""The steps that tilings are chosen by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import jax
import jax.numpy as jnp

from paged.attention import mosaic
from paged.attention.tiling import DecodeTiling, Heads, PrefillTiling
from paged.attention.tuning.candidates import decode_candidates, prefill_candidates
from paged.cache import CacheSpec, Pages


@dataclass(frozen=True)
class Layer:
    """The layer of a model whose attention is timed.

    Attributes:
        num_heads: query heads (Hq).
        cache: its pages.
        dtype: of queries.
        backend: name in `paged.attention.BACKENDS`, one that has kernels.
    """

    num_heads: int
    cache: CacheSpec
    dtype: jnp.dtype
    backend: str

    @property
    def heads(self) -> Heads:
        return Heads.of(*self._shapes)

    def mosaic(self, *, decode: bool) -> bool:
        """Whether kernels in Mosaic run it, if it decodes or if it does not."""
        obstacle = mosaic.decode.obstacle if decode else mosaic.prefill.obstacle
        return self.backend == "mosaic" and obstacle(*self._shapes) is None

    @property
    def _shapes(self) -> tuple[jax.ShapeDtypeStruct, Pages]:
        q = jax.ShapeDtypeStruct((1, self.num_heads, self.cache.head_dim), self.dtype)
        return q, jax.eval_shape(lambda: Pages.zeros(self.cache))


@dataclass(frozen=True)
class Workload:
    """A step of rows that are all alike: decoding ones, or a chunk.

    Attributes:
        rows: sequences.
        query: tokens of each; 1 where it decodes.
        context: tokens of each in pages before.
    """

    rows: int
    query: int
    context: int

    @property
    def size(self) -> int:
        """By which a tiling is picked: rows that decode, or a chunk's tokens."""
        return self.rows * self.query

    @property
    def length(self) -> int:
        return self.query + self.context


@dataclass(frozen=True)
class Case:
    """Steps of one shape: one tiling is chosen for them, and one program runs them.

    Attributes:
        decode: whether they decode.
        size: see `Workload`.
        workloads: the steps.
    """

    decode: bool
    size: int
    workloads: tuple[Workload, ...]

    @property
    def rows(self) -> int:
        return self.workloads[0].rows

    @property
    def longest(self) -> int:
        return max(each.length for each in self.workloads)

    def candidates(self, layer: Layer) -> list[DecodeTiling] | list[PrefillTiling]:
        """The tilings to try, the rule's own first."""
        find = decode_candidates if self.decode else prefill_candidates
        return find(layer.heads, mosaic=layer.mosaic(decode=self.decode))


_DECODE = ((1, 16384), (32, 1024), (32, 4096), (256, 1024))
_PREFILL = ((2048, 6144),)


def cases(max_rows: int, max_tokens: int, max_len: int) -> list[Case]:
    """From a single sequence to a full server, as far as an engine's limits allow.

    Args:
        max_rows, max_tokens: of a step.
        max_len: tokens of a sequence.
    """
    steps = sorted(set(_steps(max_rows, max_tokens, max_len)), key=_kind_and_size)
    return [
        Case(decode, size, tuple(of_size))
        for (decode, size), of_size in groupby(steps, key=_kind_and_size)
    ]


def _kind_and_size(step: Workload) -> tuple[bool, int]:
    return step.query == 1, step.size


def _steps(max_rows: int, max_tokens: int, max_len: int) -> Iterator[Workload]:
    for rows, length in _DECODE:
        if rows <= max_rows:
            yield Workload(rows, 1, min(length, max_len) - 1)
    for query, context in _PREFILL:
        query = min(query, max_tokens, max_len)
        if query > 1:
            yield Workload(1, query, min(context, max_len - query))
