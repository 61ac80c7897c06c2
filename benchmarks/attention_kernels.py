"""How fast attention over pages is on this GPU, against what its memory and tensor cores can do.

Times one layer's attention of an 8B model by the GPU's own clock (CUPTI): decode batches in bytes
of keys and values per second, as a share of what summing a large array reads; prefill chunks in
FLOP per second, as a share of a large matrix product. Every call sees other pages of a pool much
larger than the cache of the GPU. Errors are norms relative to the reference in float32, over the
same pages.

    python benchmarks/attention_kernels.py --json kernels.json
    python benchmarks/attention_kernels.py --kv-dtype bfloat16 fp8 int8 --only "256 x 1024"
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.floors import Ceilings
from benchmarks.gpu import (
    DTYPE,
    ceilings,
    difference,
    gpu_arguments,
    median_microseconds,
    page_tables,
    random,
    repeated,
)
from paged.attention import BACKENDS, AttentionMetadata, Scoring, attention_metadata
from paged.attention.tiling import BY_RULE, Tilings
from paged.attention.tuned import TUNED
from paged.cache import KV_DTYPES, CacheSpec, Pages, as_stored

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
POOL_TOKENS = 1_000_000
# What the calls of one timed program read together at least: several times the GPU's cache.
COLD_BYTES = 200_000_000


@dataclass(frozen=True)
class Case:
    """A step to time.

    Attributes:
        name: for the table.
        rows: (tokens of the step, earlier context) of each row; all decode, or all prefill.
        padded_rows: R, what the step is compiled for.
        backends: those to time.
        kv_dtype: what pages hold, by the name that users give it.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    padded_rows: int
    backends: tuple[str, ...]
    kv_dtype: str = "bfloat16"

    @property
    def spec(self) -> CacheSpec:
        """The pages of a layer."""
        pages, dtype = POOL_TOKENS // PAGE_SIZE, KV_DTYPES[self.kv_dtype]
        return CacheSpec(1, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype)

    @property
    def decode(self) -> bool:
        return all(query == 1 for query, _ in self.rows)

    @property
    def num_tokens(self) -> int:
        return self.padded_rows if self.decode else sum(query for query, _ in self.rows)

    @property
    def work(self) -> float:
        """Bytes of keys and values to read (decode), or FLOP (prefill)."""
        if self.decode:
            bytes_per_token = self.spec.bytes_per_page / PAGE_SIZE
            return sum(context + 1 for _, context in self.rows) * bytes_per_token
        return 4 * HEADS * HEAD_DIM * self._seen

    @property
    def calls(self) -> int:
        """Calls in one timed program, each with page tables of its own."""
        return max(4, min(32, int(COLD_BYTES / self.work))) if self.decode else 4

    @property
    def _seen(self) -> float:
        return sum(query * context + query * (query + 1) / 2 for query, context in self.rows)


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        case, kv_dtype, backend: of what.
        microseconds: of all kernels, per call, median over runs. What depends on the step alone
            is done once for all calls, as for the layers of a model.
        kernel_microseconds: of the attention kernels among them.
        rate: bytes or FLOP per second, by `microseconds`.
        share: of the ceiling.
        error: against the reference; None where that was not computed.
    """

    case: str
    kv_dtype: str
    backend: str
    microseconds: float
    kernel_microseconds: float
    rate: float
    share: float
    error: float | None


def cases() -> Iterator[Case]:
    """Batches and chunks from a single sequence to a full server."""
    fast: tuple[str, ...] = ("mosaic", "triton")
    every: tuple[str, ...] = (*fast, "xla")
    for batch, length in (
        (1, 1024),
        (1, 16384),
        (8, 1024),
        (8, 4096),
        (32, 300),
        (32, 1024),
        (32, 4096),
        (128, 1024),
        (256, 300),
        (256, 1024),
    ):
        backends = every if (batch, length) == (32, 1024) else fast
        rows = ((1, length - 1),) * batch
        yield Case(f"decode {batch} x {length}", rows, batch, backends)
    lengths = np.random.default_rng(0).integers(64, 4096, 64)
    ragged = tuple((1, int(length)) for length in lengths)
    yield Case("decode 64 x 64-4096", ragged, 64, fast)
    yield Case("decode 4 x 8192 of 256", ((1, 8191),) * 4, 256, fast)
    for query, context in ((512, 1024), (2048, 0), (2048, 2048), (2048, 6144), (8192, 0)):
        backends = every if query == 512 else fast
        yield Case(f"prefill {query} on {context}", ((query, context),), 1, backends)
    yield Case("prefill 2048 on 6144, of 256", ((2048, 6144),), 256, fast)
    for query in (16, 64, 256, 640, 1024):
        yield Case(f"chunk {query} on 30000", ((query, 30_000),), 256, ("mosaic",))
    beside = ((64, 30_000), (300, 0), (300, 0))
    yield Case("chunk 64 on 30000 beside 2 x 300", beside, 256, ("mosaic",))
    short = tuple((64, 64 * n) for n in range(32))
    yield Case("prefill 32 x 64 on 0-1984", short, 256, fast)


def jobs(only: str, kv_dtypes: list[str]) -> list[tuple[Case, str]]:
    """The cases whose names contain `only` over pages of each type, with each of their backends
    that this GPU runs."""
    hopper = jax.devices()[0].compute_capability == "9.0"
    return [
        (replace(case, kv_dtype=kv_dtype), backend)
        for case in cases()
        if only in case.name
        for kv_dtype in kv_dtypes
        for backend in case.backends
        if hopper or backend != "mosaic"
    ]


def main() -> None:
    """Time all cases; print a table and write it to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--kv-dtype",
        nargs="+",
        default=["bfloat16"],
        choices=["bfloat16", "fp8", "fp8_e5m2", "int8"],
        help="what pages hold; one or more",
    )
    parser.add_argument("--budget", type=float, default=150, help="stop after so many seconds")
    options = gpu_arguments(parser)

    began = time.monotonic()
    wanted = jobs(options.only, options.kv_dtype)
    card = ceilings()
    print(
        f"{jax.devices()[0].device_kind}: reads {card.bytes_per_second / 1e12:.2f} TB/s, "
        f"multiplies {card.flop_per_second / 1e12:.0f} TFLOP/s\n{HEADER}"
    )
    pools = {kv_dtype: make_pool(KV_DTYPES[kv_dtype]) for kv_dtype in options.kv_dtype}
    results = []
    with ThreadPoolExecutor() as threads:
        programs = threads.map(lambda job: compiled(*job), wanted)
        for (case, backend), program in zip(wanted, programs, strict=True):
            if time.monotonic() - began > options.budget:
                print(f"out of time before {case.name}, {backend}")
                break
            results.append(measure(case, backend, program, pools[case.kv_dtype], card))
            print(row_of(results[-1], case), flush=True)
    if options.json:
        report = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "ceilings": asdict(card),
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


HEADER = (
    f"{'case':30} {'pages':8} {'backend':8} "
    f"{'us':>8} {'kernel':>8} {'rate':>13} {'share':>6} {'error':>8}"
)


def row_of(result: Result, case: Case) -> str:
    """One line of the table."""
    unit, rate = ("TB/s", "7.2f") if case.decode else ("TFLOP/s", "5.0f")
    error = "" if result.error is None else f"{result.error:.1e}"
    return (
        f"{result.case:30} {result.kv_dtype:8} {result.backend:8} {result.microseconds:8.1f} "
        f"{result.kernel_microseconds:8.1f} {f'{result.rate / 1e12:{rate}} {unit}':>13} "
        f"{result.share:6.1%} {error:>8}"
    )


def attend(
    q: jax.Array, pages: Pages, meta: AttentionMetadata, tables: list[jax.Array], decode: bool
) -> list[jax.Array]:
    """One layer's attention over each of several page tables, as layers follow each other."""
    backend = BACKENDS[meta.backend]()
    scoring = Scoring(HEAD_DIM**-0.5)
    metas = [replace(meta, page_tables=table) for table in tables]
    if not decode:
        return [backend.prefill(q, pages, meta, scoring, None) for meta in metas]
    lengths = jnp.where(meta.query_len == 1, meta.context_len + 1, 0)
    return [backend.decode(q, pages, lengths, meta, scoring, None) for meta in metas]


def metadata(case: Case, backend: str, tables: jax.Array) -> AttentionMetadata:
    """The metadata of a case over these page tables [rows, P]."""
    padding = [0] * (case.padded_rows - len(case.rows))
    return attention_metadata(
        tables,
        jnp.asarray([*range(len(case.rows)), *padding], jnp.int32),
        jnp.asarray([query for query, _ in case.rows] + padding, jnp.int32),
        jnp.asarray([context for _, context in case.rows] + padding, jnp.int32),
        num_tokens=case.num_tokens,
        page_size=PAGE_SIZE,
        tile_size=BACKENDS[backend]().tile_size,
        decode_only=case.decode,
        backend=backend,
        tilings=tilings(case),
    )


def tilings(case: Case) -> Tilings:
    """Those of the table, as an engine has them."""
    key = (HEAD_DIM, HEADS // KV_HEADS, PAGE_SIZE, KV_DTYPES[case.kv_dtype].name)
    return TUNED.get(jax.devices()[0].device_kind, {}).get(key, BY_RULE)


def table_shape(case: Case) -> tuple[int, int]:
    """Page tables [rows, P] that hold the longest row."""
    longest = max(query + context for query, context in case.rows)
    return len(case.rows), -(-longest // PAGE_SIZE)


def compiled(case: Case, backend: str) -> Callable[..., list[jax.Array]]:
    """The timed program of a case, for a list of page tables."""
    struct = jax.ShapeDtypeStruct
    table = struct(table_shape(case), jnp.int32)
    meta = jax.eval_shape(functools.partial(metadata, case, backend), table)
    pages = jax.eval_shape(lambda: Pages.zeros(case.spec))
    q = struct((case.num_tokens, HEADS, HEAD_DIM), DTYPE)
    function = jax.jit(functools.partial(attend, decode=case.decode))
    return function.lower(q, pages, meta, [table] * case.calls).compile()


def measure(
    case: Case,
    backend: str,
    program: Callable[..., list[jax.Array]],
    pool: Pages,
    card: Ceilings,
) -> Result:
    """Time a compiled case, and compare it with the reference where a case has it."""
    tables = page_tables(table_shape(case), POOL_TOKENS // PAGE_SIZE, case.calls)
    meta = metadata(case, backend, tables[0])
    q = random(1, (case.num_tokens, HEADS, HEAD_DIM))
    outputs, runs = repeated(program, q, pool, meta, tables)
    microseconds = median_microseconds(runs) / case.calls
    rate = case.work / microseconds * 1e6
    error = None
    if "xla" in case.backends and backend != "xla":
        error = relative_error(case, outputs[0], q, pool, tables[0])
    return Result(
        case=case.name,
        kv_dtype=case.kv_dtype,
        backend=backend,
        microseconds=microseconds,
        kernel_microseconds=median_microseconds(runs, "paged") / case.calls,
        rate=rate,
        share=rate / (card.bytes_per_second if case.decode else card.flop_per_second),
        error=error,
    )


def relative_error(
    case: Case, out: jax.Array, q: jax.Array, pool: Pages, tables: jax.Array
) -> float:
    """Norm of the error of an output against the reference in float32, relative to the output."""
    # Only the pages in use, in float32: the pool four bytes wide would take twice its memory.
    used, places = np.unique(np.asarray(tables), return_inverse=True)
    pages = jax.tree.map(lambda stored: stored[used], pool)
    if pages.dtype == DTYPE:
        pages = as_stored(pages.values.astype(jnp.float32), jnp.dtype(jnp.float32))
    meta = metadata(case, "xla", jnp.asarray(places.reshape(tables.shape), jnp.int32))
    with jax.default_matmul_precision("highest"):
        function = jax.jit(functools.partial(attend, decode=case.decode))
        [exact] = function(q.astype(jnp.float32), pages, meta, [meta.page_tables])
    tokens = sum(query for query, _ in case.rows)
    return float(difference(out[:tokens].ravel(), exact[:tokens].ravel()))


@functools.partial(jax.jit, static_argnums=0)
def make_pool(dtype: jnp.dtype) -> Pages:
    """The pages of one layer, 4 GB in 16 bits."""
    shape = POOL_TOKENS // PAGE_SIZE, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM
    return as_stored(random(0, shape), dtype)


if __name__ == "__main__":
    main()
