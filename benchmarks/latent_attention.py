"""How fast attention over latents (DeepSeek) is on this GPU, against what it has to do.

Times one layer by the GPU's own clock (CUPTI): decode against the time to read each row of the
latents once, or to multiply it for all heads where that takes longer; prefill against its products.
Both ceilings are measured here. Every call sees other pages of a pool much larger than the cache of
the GPU. Errors are norms relative to the reference in float32.

    python benchmarks/latent_attention.py --json latents.json
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
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
from paged.attention import (
    BACKENDS,
    AttentionMetadata,
    Scoring,
    attention_metadata,
    default_backend,
)
from paged.cache import Pages

RANK, ROTATED, PAGE_SIZE = 512, 64, 16
ROW = RANK + ROTATED
SCORING = Scoring(192**-0.5)
POOL_TOKENS = 2_000_000
# What the calls of one timed program read together, unless that takes too many of them: several
# times the GPU's cache.
COLD_BYTES, MOST_CALLS = 300_000_000, 64
# V2-Lite has 16 heads, V2 and V3 have 128.
DECODE = [
    *((16, batch, 1024) for batch in (1, 8, 32, 128, 256)),
    *((16, batch, 4096) for batch in (8, 32, 128)),
    (16, 1, 16384),
    *((128, batch, 4096) for batch in (8, 32, 128)),
]
PREFILL = [(16, 2048, 0), (16, 2048, 6144), (16, 8192, 0), (128, 2048, 2048)]


@dataclass(frozen=True)
class Case:
    """A step to time.

    Attributes:
        heads: query heads.
        rows: sequences, all alike.
        query: tokens of each in the step; 1 where they decode.
        context: tokens of each in pages before.
    """

    heads: int
    rows: int
    query: int
    context: int

    @property
    def name(self) -> str:
        if self.query == 1:
            return f"{self.heads} heads, decode {self.rows} x {self.context + 1}"
        return f"{self.heads} heads, prefill {self.query} on {self.context}"

    @property
    def bytes(self) -> float:
        """Of the rows of all sequences, each once."""
        return self.rows * (self.query + self.context) * ROW * jnp.dtype(DTYPE).itemsize

    @property
    def flop(self) -> float:
        pairs = self.rows * self.query * (self.context + (self.query + 1) / 2)
        return 2 * self.heads * (ROW + RANK) * pairs

    @property
    def calls(self) -> int:
        """Calls in one timed program, each with page tables of its own."""
        return max(4, min(MOST_CALLS, int(COLD_BYTES / self.bytes))) if self.query == 1 else 2

    @property
    def table(self) -> jax.ShapeDtypeStruct:
        pages = -(-(self.query + self.context) // PAGE_SIZE)
        return jax.ShapeDtypeStruct((self.rows, pages), jnp.int32)

    def floor(self, card: Ceilings) -> float:
        """The least seconds for it."""
        return max(self.bytes / card.bytes_per_second, self.flop / card.flop_per_second)


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        case, backend: of what.
        microseconds: of all kernels, per call, median over runs.
        bytes_per_second, flop_per_second: by that time.
        share: of it, the floor's.
        error: against the reference; None where that was not computed.
    """

    case: str
    backend: str
    microseconds: float
    bytes_per_second: float
    flop_per_second: float
    share: float
    error: float | None


def cases() -> list[Case]:
    """From a single sequence to a full server."""
    decode = [Case(heads, batch, 1, length - 1) for heads, batch, length in DECODE]
    return decode + [Case(heads, 1, query, context) for heads, query, context in PREFILL]


def metadata(case: Case, backend: str, tables: jax.Array) -> AttentionMetadata:
    """The metadata of a case over these page tables."""
    return attention_metadata(
        tables,
        jnp.arange(case.rows, dtype=jnp.int32),
        jnp.full(case.rows, case.query, jnp.int32),
        jnp.full(case.rows, case.context, jnp.int32),
        num_tokens=case.rows * case.query,
        page_size=PAGE_SIZE,
        tile_size=BACKENDS[backend]().tile_size,
        decode_only=case.query == 1,
        backend=backend,
    )


def attend(
    q: jax.Array, pages: Pages, tables: list[jax.Array], *, case: Case, backend: str
) -> list[jax.Array]:
    """One layer's attention over each of several page tables, as layers follow each other."""
    meta = metadata(case, backend, tables[0])

    @jax.jit  # a function of its own, so that its kernels are lowered once
    def attention(table: jax.Array) -> jax.Array:
        each, kernels = replace(meta, page_tables=table), BACKENDS[backend]()
        if case.query > 1:
            return kernels.prefill(q, pages, each, SCORING, None)
        return kernels.decode(q, pages, meta.context_len + 1, each, SCORING, None)

    return [attention(table) for table in tables]


def make_pool() -> Pages:
    """The pages of one layer, 2.3 GB."""
    values = random(0, (POOL_TOKENS // PAGE_SIZE, PAGE_SIZE, ROW))
    return Pages(values, None, values.dtype, RANK)


def compiled(case: Case, backend: str) -> Callable[..., list[jax.Array]]:
    """The timed program of a case, for a list of page tables."""
    q = jax.ShapeDtypeStruct((case.rows * case.query, case.heads, ROW), DTYPE)
    function = jax.jit(functools.partial(attend, case=case, backend=backend))
    return function.lower(q, jax.eval_shape(make_pool), [case.table] * case.calls).compile()


def measure(
    case: Case,
    backend: str,
    program: Callable[..., list[jax.Array]],
    pool: Pages,
    card: Ceilings,
) -> Result:
    """Time a compiled case, and compare it with the reference where that is quick."""
    tables = page_tables(case.table.shape, POOL_TOKENS // PAGE_SIZE, case.calls)
    q = random(1, (case.rows * case.query, case.heads, ROW))
    outputs, runs = repeated(program, q, pool, tables)
    seconds = median_microseconds(runs) / case.calls / 1e6
    quick = backend != "xla" and case.flop < 1e11
    return Result(
        case=case.name,
        backend=backend,
        microseconds=1e6 * seconds,
        bytes_per_second=case.bytes / seconds,
        flop_per_second=case.flop / seconds,
        share=case.floor(card) / seconds,
        error=relative_error(case, outputs[0], q, pool, tables[0]) if quick else None,
    )


def relative_error(
    case: Case, out: jax.Array, q: jax.Array, pool: Pages, tables: jax.Array
) -> float:
    """Norm of the error of an output against the reference in float32, relative to the output."""
    used, places = np.unique(np.asarray(tables), return_inverse=True)
    values = pool.values[used].astype(jnp.float32)
    pages = Pages(values, None, values.dtype, RANK)
    tables = jnp.asarray(places.reshape(tables.shape), jnp.int32)
    with jax.default_matmul_precision("highest"):
        function = jax.jit(functools.partial(attend, case=case, backend="xla"))
        [exact] = function(q.astype(jnp.float32), pages, [tables])
    return float(difference(out.ravel(), exact.ravel()))


HEADER = (
    f"{'case':34} {'backend':8} {'us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'of floor':>8} {'error':>8}"
)


def row_of(result: Result) -> str:
    """One line of the table."""
    error = "" if result.error is None else f"{result.error:.1e}"
    return (
        f"{result.case:34} {result.backend:8} {result.microseconds:9.1f} "
        f"{result.bytes_per_second / 1e12:6.2f} {result.flop_per_second / 1e12:8.1f} "
        f"{result.share:8.1%} {error:>8}"
    )


def main() -> None:
    """Time all cases; print a table and write it to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--backends", nargs="+", help="default: the one that serves on this GPU")
    parser.add_argument("--budget", type=float, default=150, help="stop after so many seconds")
    options = gpu_arguments(parser)

    began, device = time.monotonic(), jax.devices()[0]
    backends = options.backends or [default_backend(device)]
    jobs = [(case, each) for case in cases() if options.only in case.name for each in backends]
    card = ceilings()
    print(
        f"{device.device_kind}: reads {card.bytes_per_second / 1e12:.2f} TB/s, "
        f"multiplies {card.flop_per_second / 1e12:.0f} TFLOP/s\n{HEADER}"
    )
    pool, results = make_pool(), []
    with ThreadPoolExecutor() as threads:
        programs = threads.map(lambda job: compiled(*job), jobs)
        for (case, backend), program in zip(jobs, programs, strict=True):
            if time.monotonic() - began > options.budget:
                print(f"out of time before {case.name}, {backend}")
                break
            results.append(measure(case, backend, program, pool, card))
            print(row_of(results[-1]), flush=True)
    if options.json:
        report = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "ceilings": asdict(card),
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
