"""Find the fastest tilings of our matrix products on this GPU, and where XLA is faster still.

For each product and number of rows it times XLA, which tunes itself first, and the tilings that the
estimate in `paged.matmul.estimate` thinks best, together with what follows the product in a model:
the gate, or a sum and the norm after it. All run in turn, round after round, on a GPU kept as busy
as a server keeps it, by the GPU's own clock (CUPTI). Weights come from memory, not from its caches.

    python benchmarks/tune_matmul.py --json found.json --table paged/matmul/tuned.py
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import MISSING, asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.gpu import DTYPE, difference, gpu_arguments, kernels, random
from benchmarks.tables import short, with_products
from paged.matmul import Tiling, matmul
from paged.matmul.estimate import ranked_tilings
from paged.matmul.tuned import TUNED, Product, UpTo

# What the calls of one program read together at least: several times the cache of the GPU.
COLD_BYTES = 250_000_000
ROUNDS, MILLISECONDS_A_ROUND, MILLISECONDS_BEFORE = 5, 5, 30
# Tilings to try for one case: so many, and no more than this much slower by the estimate.
MOST_TILINGS, SLOWEST = 8, 1.15
# How much faster than XLA a tiling must be to be preferred, and how far it may be from its result.
GAIN, ERROR = 1.005, 1e-2
# Threads that compile for XLA, which times kernels meanwhile, and for us.
XLA_THREADS, OUR_THREADS = 2, 12
ROWS = [256, 32, 1, 128, 1024, 8, 64, 512, 8192, 192, 384, 768, 2048, 96, 16, 4096]
SHAPES = [
    "gated:4096:14336",
    "residual:14336:4096",
    "plain:4096:6144",
    "residual:4096:4096",
    "logits:4096:128256",
]


@dataclass(frozen=True)
class Case:
    """A product to tune: x [m, k] and an output [m, n], and what follows it.

    Attributes:
        kind: "plain"; "gated"; "residual", a sum and the norm after it; or "logits" in float32.
    """

    kind: str
    k: int
    n: int
    m: int

    @classmethod
    def parse(cls, shape: str, m: int) -> Case:
        kind, k, n = shape.split(":")
        if kind not in ("plain", "gated", "residual", "logits"):
            raise SystemExit(f"not a shape: {shape!r}; see --help")
        return cls(kind, int(k), int(n), m)

    @property
    def product(self) -> Product:
        return (self.kind == "gated", self.k, self.n)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.k, 2, self.n) if self.kind == "gated" else (self.k, self.n)

    @property
    def weight_bytes(self) -> int:
        return 2 * self.k * self.n * (2 if self.kind == "gated" else 1)

    @property
    def calls(self) -> int:
        """Calls in one program, each with a weight of its own."""
        return max(1, -(-COLD_BYTES // self.weight_bytes))

    def candidates(self) -> list[Tiling]:
        gated, residual = self.kind == "gated", self.kind == "residual"
        ranked = ranked_tilings(self.m, self.k, self.n, gated=gated, residual=residual)
        return [each for time, each in ranked if time < SLOWEST * ranked[0][0]][:MOST_TILINGS]

    def guess(self) -> float:
        """Milliseconds of a call, roughly."""
        flop = self.m * self.weight_bytes
        return max(self.weight_bytes / 4e9, flop / 7e11) + 0.002


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        case, tiling: of what; a tiling of None is XLA.
        microseconds: of all kernels of a call, median over the rounds.
        error: norm of the difference from XLA's result, relative to its norm.
    """

    case: Case
    tiling: Tiling | None
    microseconds: float
    error: float


def main() -> None:
    """Time all cases; print the best of each, and write what was asked for."""
    options = parse_arguments()
    deadline = time.monotonic() + options.seconds
    cases = [Case.parse(shape, m) for m in options.rows for shape in options.shapes]
    print(f"{len(cases)} cases on {jax.devices()[0].device_kind}", flush=True)
    results: list[Result] = []
    for found in measured(cases, deadline):
        results += found
        print(summary(found), flush=True)
        if options.json:
            rows = [asdict(result) for result in results]
            options.json.write_text(json.dumps(rows, indent=1))
    table = {jax.devices()[0].device_kind: tuned(results)}
    merged = TUNED | {kind: TUNED.get(kind, {}) | found for kind, found in table.items()}
    text = with_products("TUNED", merged)
    if options.table:
        options.table.write_text(text)
    else:
        print(text)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        metavar="KIND:K:N",
        help="products to tune: plain, gated, residual or logits, inputs and outputs",
    )
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, metavar="M")
    parser.add_argument("--json", type=Path, help="write all that is measured here")
    parser.add_argument("--table", type=Path, help="write the table here, with what it had")
    parser.add_argument("--seconds", type=float, default=3600, help="stop after so long")
    return gpu_arguments(parser)


def measured(cases: list[Case], deadline: float) -> Iterator[list[Result]]:
    """The results of each case. What is not compiled in most of the time is left out."""
    began = time.monotonic()
    time_left = deadline - began
    xla = compiled({case: [None] for case in cases}, XLA_THREADS, began + 0.45 * time_left)
    print(f"XLA compiled for {len(xla)} cases in {time.monotonic() - began:.0f} s", flush=True)
    ours = compiled({case: case.candidates() for case in xla}, OUR_THREADS, began + 0.8 * time_left)
    print(f"ours compiled after {time.monotonic() - began:.0f} s", flush=True)
    in_order = sorted(ours, key=lambda case: (case.kind, case.k, case.n))
    for shape, of_shape in groupby(in_order, weight_key):
        weights = [random(i, shape.weight_shape, 1 / shape.k) for i in range(shape.calls)]
        for case in of_shape:
            if time.monotonic() < deadline:
                yield measure(case, {None: xla[case][None], **ours[case]}, weights)
        for weight in weights:
            weight.delete()


def weight_key(case: Case) -> Case:
    """Cases of one weight, as the same case."""
    return Case(case.kind, case.k, case.n, 0)


Programs = dict[Tiling | None, Any]


def compiled(wanted: dict[Case, list[Any]], threads: int, deadline: float) -> dict[Case, Programs]:
    """Compiled programs of the cases that are all done by the deadline."""
    pool = ThreadPoolExecutor(threads)
    futures: dict[Case, dict[Tiling | None, Future[Any]]] = {
        case: {tiling: pool.submit(compile_one, case, tiling) for tiling in tilings}
        for case, tilings in wanted.items()
    }
    everything = [future for of_case in futures.values() for future in of_case.values()]
    wait(everything, timeout=max(0.0, deadline - time.monotonic()))
    pool.shutdown(wait=True, cancel_futures=True)
    for case, of_case in futures.items():
        for tiling, future in of_case.items():
            if not future.cancelled() and (error := future.exception()):
                print(f"does not compile: {case} {short(tiling)}: {error}"[:500], flush=True)
    return {
        case: {
            tiling: future.result() for tiling, future in of_case.items() if not future.exception()
        }
        for case, of_case in futures.items()
        if not any(future.cancelled() for future in of_case.values())
    }


def compile_one(case: Case, tiling: Tiling | None) -> Any:
    """A program that calls the product once for each weight."""

    def program(x: jax.Array, weights: list[jax.Array], residual: jax.Array | None) -> list[Any]:
        return [one(x, weight, residual) for weight in weights]

    one = jax.jit(functools.partial(product, case, tiling))
    x = jax.ShapeDtypeStruct((case.m, case.k), DTYPE)
    weight = jax.ShapeDtypeStruct(case.weight_shape, DTYPE)
    residual = jax.ShapeDtypeStruct((case.m, case.n), DTYPE) if case.kind == "residual" else None
    return jax.jit(program).lower(x, [weight] * case.calls, residual).compile()


def product(
    case: Case, tiling: Tiling | None, x: jax.Array, w: jax.Array, residual: jax.Array | None
) -> Any:
    """A product and what follows it in a model."""
    out_dtype = jnp.dtype(jnp.float32 if case.kind == "logits" else DTYPE)
    if tiling is not None:
        out = matmul(x, w, tiling, residual=residual, out_dtype=out_dtype)
    else:
        out = jnp.tensordot(x, w, 1, preferred_element_type=out_dtype)
        if case.kind == "gated":
            gate, up = out[:, 0].astype(jnp.float32), out[:, 1].astype(jnp.float32)
            out = (jax.nn.silu(gate) * up).astype(DTYPE)
        elif residual is not None:
            out = out + residual
    return (out, normed(out)) if case.kind == "residual" else out


def normed(x: jax.Array) -> jax.Array:
    """x scaled to a mean square of 1, row by row."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=1, keepdims=True) + 1e-5)).astype(x.dtype)


def measure(case: Case, programs: Programs, weights: list[jax.Array]) -> list[Result]:
    """Time the programs of a case, XLA's first."""
    x = random(1001, (case.m, case.k))
    residual = random(1002, (case.m, case.n)) if case.kind == "residual" else None
    runs = {
        tiling: functools.partial(each, x, weights, residual) for tiling, each in programs.items()
    }
    last = {tiling: jax.tree.leaves(run()[-1])[0] for tiling, run in runs.items()}
    errors = {tiling: float(difference(out, last[None])) for tiling, out in last.items()}
    del last
    times = timed(list(runs.values()), case.guess(), case.calls)
    return [
        Result(case, tiling, microseconds, errors[tiling])
        for tiling, microseconds in zip(runs, times, strict=True)
    ]


def timed(runs: list[Callable[[], Any]], guess: float, calls: int) -> list[float]:
    """Microseconds of a call of each program, which makes `calls` of about `guess` milliseconds.

    A marker parts the programs in the list of kernels.
    """
    once = guess * calls
    repeats = max(1, round(MILLISECONDS_A_ROUND / once))
    number = jnp.ones(8)
    jax.block_until_ready(mark(number))

    def in_turn() -> None:
        for _ in range(max(1, round(MILLISECONDS_BEFORE / once))):
            runs[0]()
        for run in runs * ROUNDS:
            mark(number)
            for _ in range(repeats):
                last = run()
        jax.block_until_ready(last)

    sums: list[float] = []
    for name, milliseconds in kernels(in_turn):
        if "sine" in name:
            sums.append(0.0)
        elif sums:
            sums[-1] += milliseconds
    if len(sums) != len(runs) * ROUNDS:
        raise RuntimeError(f"expected {len(runs) * ROUNDS} marked parts, found {len(sums)}")
    per_call = [1e3 * total / repeats / calls for total in sums]
    return [statistics.median(per_call[i :: len(runs)]) for i in range(len(runs))]


@jax.jit
def mark(number: jax.Array) -> jax.Array:
    """A kernel whose name nothing else here has."""
    return jnp.sin(number)


def best(results: list[Result]) -> Result:
    """The fastest, or XLA where that is as good."""
    xla = next(result for result in results if result.tiling is None)
    correct = [result for result in results if result.error < ERROR]
    fastest = min(correct, key=lambda result: result.microseconds)
    return fastest if fastest.microseconds * GAIN < xla.microseconds else xla


def summary(results: list[Result]) -> str:
    """A line for a case: XLA, and the tilings from the fastest to the slowest."""
    case = results[0].case
    xla = next(result for result in results if result.tiling is None)
    ours = sorted((r for r in results if r.tiling is not None), key=lambda r: r.microseconds)
    texts = [
        f"{result.microseconds:.1f} {short(result.tiling)}"
        + (f" WRONG {result.error:.1e}" if result.error >= ERROR else "")
        for result in ours
    ]
    head = f"{case.kind} {case.k}x{case.n} {case.m}: xla {xla.microseconds:.1f}"
    gain = xla.microseconds / ours[0].microseconds if ours else 0
    return f"{head} x{gain:.3f} | " + " | ".join(texts)


def tuned(results: list[Result]) -> dict[Product, tuple[UpTo, ...]]:
    """The table of what was measured."""
    by_case: dict[Case, list[Result]] = {}
    for result in results:
        by_case.setdefault(result.case, []).append(result)
    table: dict[Product, dict[int, Tiling | None]] = {}
    for case, found in sorted(by_case.items(), key=lambda pair: pair[0].m):
        table.setdefault(case.product, {})[case.m] = best(found).tiling
    return {product: joined(rows) for product, rows in table.items()}


def joined(rows: dict[int, Tiling | None]) -> tuple[UpTo, ...]:
    """Without a number of rows whose tiling is that of the next."""
    pairs = list(rows.items())
    following = [*pairs[1:], (0, MISSING)]
    return tuple(pair for pair, after in zip(pairs, following, strict=True) if pair[1] != after[1])


if __name__ == "__main__":
    main()
