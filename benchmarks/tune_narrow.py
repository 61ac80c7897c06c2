"""Find the fastest cuts of products with weights of 4 and 8 bits on this GPU.

As `tune_matmul.py`, with its shapes and its clock, but XLA is not asked: for floats of 8 bits it
takes minutes to tune itself. Activations come quantised where the weight multiplies such.

    python benchmarks/tune_narrow.py --format fp8 --json fp8.json --table paged/matmul/tuned.py

Formats: fp8 and int8, both sides of 8 bits; int4 and tiles (fp8 weights with a scale for each 128
inputs), the weights alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.gpu import DTYPE, gpu_arguments, random
from benchmarks.tables import short, with_products
from benchmarks.tune_matmul import COLD_BYTES, SLOWEST, Case, joined, normed, timed
from paged.matmul import FP8, INT4, narrow_matmul, scaled_matmul, tuned
from paged.matmul.cuts import MEASURED_GROUP, candidate_cuts
from paged.matmul.estimate import ranked_tilings

FORMATS = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8, "int4": INT4, "tiles": FP8}
SHAPES = ["gated:4096:14336", "residual:14336:4096", "plain:4096:6144", "residual:4096:4096"]
ROWS = [1, 32, 256, 128, 64, 16, 1024, 8192]
THREADS = 14


@dataclass(frozen=True)
class Narrow:
    """A product to tune.

    Attributes:
        case: its shape and number of rows, and what follows it.
        form: one of `FORMATS`.
    """

    case: Case
    form: str

    @property
    def alone(self) -> bool:
        """Whether the weight alone is quantised."""
        return self.form in ("int4", "tiles")

    @property
    def columns(self) -> int:
        """Of the weight."""
        return self.case.n * (2 if self.case.kind == "gated" else 1)

    @property
    def weight_bytes(self) -> int:
        values = self.case.k * self.columns // (2 if self.form == "int4" else 1)
        return values + (2 * self.case.k // MEASURED_GROUP * self.columns if self.alone else 0)

    @property
    def calls(self) -> int:
        """Calls in one program, each with a weight of its own."""
        return max(1, -(-COLD_BYTES // self.weight_bytes))

    def candidates(self, most: int) -> list[Any]:
        m, k, n = self.case.m, self.case.k, self.case.n
        if self.alone:
            return candidate_cuts(m, k, self.columns, MEASURED_GROUP)[:most]
        gated, residual = self.case.kind == "gated", self.case.kind == "residual"
        dtype = jnp.dtype(jnp.int8)
        ranked = ranked_tilings(m, k, n, gated=gated, residual=residual, dtype=dtype)
        return [each for time, each in ranked if time < SLOWEST * ranked[0][0]][:most]

    def inputs(self) -> tuple[Any, ...]:
        """x, its scales, weights, theirs, and what is added; as shapes."""
        case, how = self.case, FORMATS[self.form]
        shape = jax.ShapeDtypeStruct
        added = shape((case.m, case.n), DTYPE) if case.kind == "residual" else None
        if self.alone:
            bricks = (self.columns // 64, case.k // 64, *how.shape)
            scale = shape((case.k // MEASURED_GROUP, self.columns), DTYPE)
            words = [shape(bricks, jnp.uint32)] * self.calls
            return shape((case.m, case.k), DTYPE), None, words, scale, added
        outputs = (2, case.n) if case.kind == "gated" else (case.n,)
        weights = [shape((*outputs, case.k), how)] * self.calls
        of_rows, of_columns = (shape(each, jnp.float32) for each in ((case.m,), outputs))
        return shape((case.m, case.k), how), of_rows, weights, of_columns, added


def main() -> None:
    """Time all cases; print each as it comes, and write what was asked for."""
    options = parse_arguments()
    deadline = time.monotonic() + options.seconds
    cases = [
        Narrow(Case.parse(shape, m), options.format)
        for m in options.rows
        for shape in options.shapes
    ]
    pool = ThreadPoolExecutor(THREADS)
    compiling = {
        case: {how: pool.submit(compile_one, case, how) for how in case.candidates(options.most)}
        for case in cases
    }
    found: dict[Narrow, list[tuple[float, Any]]] = {}
    for case, programs in compiling.items():
        if time.monotonic() > deadline:
            break
        found[case] = measure(case, programs)
        print(summary(case, found[case]), flush=True)
        save(options, found)
    pool.shutdown(wait=False, cancel_futures=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KIND:K:N")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, metavar="M")
    parser.add_argument("--most", type=int, default=6, help="tilings to try for a case")
    parser.add_argument("--json", type=Path, help="write all that is measured here")
    parser.add_argument("--table", type=Path, help="write the table here, with what it had")
    parser.add_argument("--seconds", type=float, default=3600, help="stop after so long")
    return gpu_arguments(parser)


def compile_one(narrow: Narrow, how: Any) -> Any:
    """A program that calls the product once for each weight."""
    one = jax.jit(functools.partial(product, narrow, how))

    def program(x: Any, of_rows: Any, weights: list[Any], of_columns: Any, added: Any) -> list[Any]:
        return [one(x, of_rows, weight, of_columns, added) for weight in weights]

    return jax.jit(program).lower(*narrow.inputs()).compile()


def product(
    narrow: Narrow, how: Any, x: Any, of_rows: Any, weight: Any, of_columns: Any, added: Any
) -> Any:
    """A product and what follows it in a model."""
    kind = narrow.case.kind
    if not narrow.alone:
        scales = (of_rows, of_columns)
        out = scaled_matmul(x, weight, scales, how, residual=added, out_dtype=jnp.dtype(DTYPE))
        return (out, normed(out)) if kind == "residual" else out
    out = narrow_matmul(x, weight, of_columns, gated=kind == "gated", cut=how)
    return (out + added, normed(out + added)) if kind == "residual" else out


@functools.cache
def weights_of(form: str, shape: tuple[int, ...], dtype: Any, count: int) -> list[jax.Array]:
    """Weights of small numbers."""
    if dtype == jnp.uint32:
        draw = functools.partial(jax.random.bits, shape=shape, dtype=dtype)
        return [draw(jax.random.key(i)) & jnp.uint32(0xB7B7B7B7) for i in range(count)]
    largest = 100 if dtype == jnp.int8 else 1
    return [(random(i, shape) * largest).astype(dtype) for i in range(count)]


def measure(narrow: Narrow, programs: dict[Any, Future[Any]]) -> list[tuple[float, Any]]:
    """Microseconds of a call with each tiling, the fastest first."""
    x, of_rows, weights, of_columns, added = narrow.inputs()
    arrays = (
        weights_of("x", x.shape, x.dtype, 1)[0],
        None if of_rows is None else jnp.ones(of_rows.shape),
        weights_of(narrow.form, weights[0].shape, weights[0].dtype, len(weights)),
        jnp.full(of_columns.shape, 0.01, of_columns.dtype),
        None if added is None else random(1, added.shape),
    )
    runs = {how: functools.partial(each.result(), *arrays) for how, each in programs.items()}
    jax.block_until_ready([run() for run in runs.values()])
    flop = 2 * narrow.case.m * narrow.case.k * narrow.columns
    guess = max(narrow.weight_bytes / 4e9, flop / 8e11) + 0.002
    times = timed(list(runs.values()), guess, narrow.calls)
    return sorted(zip(times, runs, strict=True), key=lambda pair: pair[0])


def summary(narrow: Narrow, found: list[tuple[float, Any]]) -> str:
    """A line for a case: the time of reading its weight, and of the tilings."""
    case, floor = narrow.case, narrow.weight_bytes / 4.4e6
    texts = " | ".join(f"{microseconds:.1f} {short(how)}" for microseconds, how in found)
    return f"{narrow.form} {case.kind} {case.k}x{case.n} {case.m}: floor {floor:.1f} | {texts}"


def save(options: argparse.Namespace, found: dict[Narrow, list[tuple[float, Any]]]) -> None:
    """Write what was measured so far."""
    if options.json:
        rows = [
            {**asdict(narrow), "microseconds": microseconds, "how": asdict(how)}
            for narrow, times in found.items()
            for microseconds, how in times
        ]
        options.json.write_text(json.dumps(rows, indent=1))
    if options.table:
        options.table.write_text(table(options.format, found))


def table(form: str, found: dict[Narrow, list[tuple[float, Any]]]) -> str:
    """The source of `paged.matmul.tuned` with the best of each case."""
    name = {"int4": "NARROW_INT4", "tiles": "NARROW_FP8"}.get(form, "SCALED")
    before = getattr(tuned, name)
    best: dict[Any, dict[int, Any]] = {}
    for narrow, times in sorted(found.items(), key=lambda pair: pair[0].case.m):
        case = narrow.case
        key = (case.k, narrow.columns) if narrow.alone else case.product
        best.setdefault(key, {})[case.m] = times[0][1]
    kind = jax.devices()[0].device_kind
    fresh = {product: joined(rows) for product, rows in best.items()}
    return with_products(name, before | {kind: before.get(kind, {}) | fresh})


if __name__ == "__main__":
    main()
