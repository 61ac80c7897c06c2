"""Attention on the GPU at hand, over pages that come from its memory, by its own clock."""

from __future__ import annotations

import functools
import statistics
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler
from jax.stages import Compiled

from paged.attention import BACKENDS, AttentionMetadata, attention_metadata
from paged.attention.scoring import Scoring
from paged.attention.tiling import Tilings
from paged.attention.tuning.search import Tiling
from paged.attention.tuning.workloads import Case, Layer, Workload
from paged.cache import Pages, as_stored

POOL_BYTES = 2 * 2**30
"""Of pages, from which those of each call are drawn: many times a GPU's cache."""

# What the calls of a program read together at least, so that none finds its pages in the cache.
_COLD_BYTES = 250_000_000
_FEWEST_CALLS, _MOST_CALLS, _CALLS_OF_PREFILL = 4, 32, 2
_RUNS = 5
_FAIL_ON_SPILLING = "xla_gpu_fail_ptx_compilation_on_register_spilling"
# Pages that are filled with numbers; the pool repeats them.
_FILLED_BYTES = 2**26


class GpuTimer:
    """A `search.Timer` by the clock of the first GPU."""

    def __init__(self, layer: Layer, pool_bytes: int = POOL_BYTES) -> None:
        """Fill a pool of at most so many bytes."""
        one_layer = replace(layer.cache, num_layers=1)
        num_pages = max(pool_bytes // one_layer.bytes_per_page, 1)
        self._layer = replace(layer, cache=replace(one_layer, num_pages=num_pages))
        self._pages = _filled_pages(self._layer)
        # Lowering is Python: threads that did it at once would only stand in each other's way.
        self._lowering = threading.Lock()

    def compile(self, case: Case, tiling: Tiling, *, may_spill: bool) -> Compiled:
        function, args = program_of(self._layer, case, tiling)
        with self._lowering:
            lowered = jax.jit(function).lower(*args)
        return lowered.compile({_FAIL_ON_SPILLING: not may_spill})

    def microseconds(self, case: Case, program: Compiled) -> tuple[float, ...]:
        calls = num_calls(self._layer, case)
        times = []
        for workload in case.workloads:
            args = _arrays(self._layer, case, workload, self._pages)
            times.append(device_microseconds(program, *args) / calls)
        return tuple(times)

    def close(self) -> None:
        """Give the pool's memory back."""
        for array in jax.tree.leaves(self._pages):
            array.delete()


def device_microseconds(program: Compiled, *args: Any) -> float:
    """Of all kernels of a run, median over some, by the GPU's own clock (CUPTI)."""
    _, milliseconds = profiler.measure(program, aggregate=True, iterations=_RUNS)(*args)
    if not milliseconds:
        raise RuntimeError("CUPTI saw no kernel; is another profiler attached?")
    return 1e3 * statistics.median(milliseconds)


def num_calls(layer: Layer, case: Case) -> int:
    """Calls in one program, each over page tables of its own, as layers follow each other."""
    if not case.decode:
        return _CALLS_OF_PREFILL
    tokens = min(each.rows * each.length for each in case.workloads)
    read = tokens * replace(layer.cache, num_layers=1).bytes_per_page // layer.cache.page_size
    return min(max(-(-_COLD_BYTES // read), _FEWEST_CALLS), _MOST_CALLS)


def program_of(
    layer: Layer, case: Case, tiling: Tiling
) -> tuple[Callable[..., list[jax.Array]], tuple[Any, ...]]:
    """What runs the steps of a case with a tiling, and the shapes of its arguments."""
    entry: Any = ((case.size, tiling),)
    tilings = Tilings(decode=entry) if case.decode else Tilings(prefill=entry)
    vector = jax.ShapeDtypeStruct((case.rows,), jnp.int32)
    table = jax.ShapeDtypeStruct(_table_shape(layer, case), jnp.int32)
    pages = jax.eval_shape(lambda: Pages.zeros(layer.cache))
    function = functools.partial(_candidate, layer=layer, case=case, tilings=tilings)
    tables = [table] * num_calls(layer, case)
    args = (_queries(layer, case), pages, tables, vector, vector)
    return function, args


def _candidate(
    q: jax.Array,
    pages: Pages,
    tables: list[jax.Array],
    query_len: jax.Array,
    context_len: jax.Array,
    *,
    layer: Layer,
    case: Case,
    tilings: Tilings,
) -> list[jax.Array]:
    """Attention over each of several page tables; what depends on the step alone is done once."""
    meta = attention_metadata(
        tables[0],
        jnp.arange(case.rows, dtype=jnp.int32),
        query_len,
        context_len,
        num_tokens=case.size,
        page_size=layer.cache.page_size,
        tile_size=BACKENDS[layer.backend]().tile_size,
        decode_only=case.decode,
        backend=layer.backend,
        tilings=tilings,
    )
    # A function of its own, so that its kernels are lowered once.
    attend = jax.jit(functools.partial(_attend, scoring=Scoring(layer.cache.head_dim**-0.5)))
    return [attend(q, pages, replace(meta, page_tables=table)) for table in tables]


def _attend(q: jax.Array, pages: Pages, meta: AttentionMetadata, *, scoring: Scoring) -> jax.Array:
    backend = BACKENDS[meta.backend]()
    if meta.decode_only:
        return backend.decode(q, pages, meta.context_len + 1, meta, scoring, None)
    return backend.prefill(q, pages, meta, scoring, None)


def _queries(layer: Layer, case: Case) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((case.size, layer.num_heads, layer.cache.head_dim), layer.dtype)


def _table_shape(layer: Layer, case: Case) -> tuple[int, int]:
    return case.rows, -(-case.longest // layer.cache.page_size)


def _arrays(layer: Layer, case: Case, workload: Workload, pages: Pages) -> tuple[Any, ...]:
    """What a program is called with."""
    rng = np.random.default_rng(0)
    shape = _table_shape(layer, case)
    tables = [
        jnp.asarray(rng.integers(0, layer.cache.num_pages, shape), jnp.int32)
        for _ in range(num_calls(layer, case))
    ]
    lengths = (workload.query, workload.context)
    vectors = (jnp.full(case.rows, length, jnp.int32) for length in lengths)
    q = jax.random.normal(jax.random.key(1), _queries(layer, case).shape, layer.dtype)
    return q, pages, tables, *vectors


def _filled_pages(layer: Layer) -> Pages:
    """The pool: numbers as a layer's keys and values might be."""
    cache = layer.cache
    filled = min(max(_FILLED_BYTES // cache.bytes_per_page, 1), cache.num_pages)
    repeats = -(-cache.num_pages // filled)

    @jax.jit
    def fill() -> Pages:
        heads = () if cache.latent_rank is not None else (2 * cache.num_kv_heads,)
        shape = (filled, cache.page_size, *heads, cache.head_dim)
        some = as_stored(jax.random.normal(jax.random.key(0), shape, layer.dtype), cache.dtype)
        some = replace(some, latent_rank=cache.latent_rank)
        return jax.tree.map(
            lambda x: jnp.tile(x, (repeats, *[1] * (x.ndim - 1)))[: cache.num_pages], some
        )

    return fill()
