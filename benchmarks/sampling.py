"""How long choosing tokens takes on this GPU, by number of rows, mode, filters and kind of logits.

Times `choose_tokens` (with `token_logprobs` in LOGPROBS mode) by the GPU's own clock (CUPTI), and
end to end over many calls enqueued at once. Logits are like a trained model's ("peaked": a few
tokens stand out), nearly equal ("flat", the hardest to cut), or with as many equal ones as 16 bits
leave ("ties").

    python benchmarks/sampling.py --json sampling.json
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.gpu import gpu_arguments, median_microseconds, repeated
from paged.runtime.sampler import (
    SamplerState,
    SamplingMode,
    SamplingRows,
    choose_tokens,
    token_logprobs,
)
from paged.runtime.steps import NUM_RULES

VOCAB = 128256
ROWS = (1, 32, 256, 1024)
CALLS = 20
KINDS = ("peaked", "flat", "ties")


@dataclass(frozen=True)
class Filters:
    """What every row of a batch wants."""

    top_k: int = VOCAB
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        named = {"k": (self.top_k, VOCAB), "p": (self.top_p, 1.0), "min-p": (self.min_p, 0.0)}
        return " ".join(f"{k}={value:g}" for k, (value, off) in named.items() if value != off)


FILTERS = (
    Filters(),
    Filters(top_k=50),
    Filters(top_p=0.9),
    Filters(top_k=50, top_p=0.9),
    Filters(min_p=0.05),
    Filters(top_k=5000, top_p=0.9),
)


@dataclass(frozen=True)
class Case:
    """A batch to time."""

    num_rows: int
    mode: SamplingMode
    filters: Filters
    kind: str


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        num_rows, mode, filters, kind: of what.
        microseconds: of all kernels, median over runs.
        summarise, threshold: of the two kernels of the filters among them.
        kernels: how many were launched.
        wall: microseconds from one call to the next, many of them enqueued at once.
    """

    num_rows: int
    mode: str
    filters: str
    kind: str
    microseconds: float
    summarise: float
    threshold: float
    kernels: int
    wall: float


def cases() -> Iterator[Case]:
    """Every mode on peaked logits; every filter on every kind of logits."""
    for num_rows in ROWS:
        for mode in SamplingMode:
            if mode != SamplingMode.FILTERED:
                yield Case(num_rows, mode, Filters(), "peaked")
        for filters in FILTERS:
            for kind in KINDS:
                yield Case(num_rows, SamplingMode.FILTERED, filters, kind)


def main() -> None:
    """Time all cases; print a table and write it to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--budget", type=float, default=120, help="stop after so many seconds")
    options = gpu_arguments(parser)

    began = time.monotonic()
    results = []
    print(f"{jax.devices()[0].device_kind}, vocabulary of {VOCAB}, microseconds\n{HEADER}")
    with ThreadPoolExecutor() as threads:
        keys = [(num_rows, mode) for num_rows in ROWS for mode in SamplingMode]
        jobs = {key: threads.submit(compiled, *key) for key in keys}
        for case in cases():
            if time.monotonic() - began > options.budget:
                print(f"out of time before {case}")
                break
            results.append(measure(case, jobs[case.num_rows, case.mode].result()))
            print(row_of(results[-1]), flush=True)
    if options.json:
        report = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


HEADER = (
    f"{'rows':>4} {'mode':8} {'filters':16} {'logits':6} "
    f"{'all':>8} {'summary':>8} {'threshold':>9} {'other':>8} {'kernels':>7} {'wall':>8}"
)


def row_of(result: Result) -> str:
    """One line of the table."""
    other = result.microseconds - result.summarise - result.threshold
    return (
        f"{result.num_rows:4} {result.mode:8} {result.filters:16} {result.kind:6} "
        f"{result.microseconds:8.1f} {result.summarise:8.1f} {result.threshold:9.1f} "
        f"{other:8.1f} {result.kernels:7} {result.wall:8.1f}"
    )


def choose(
    logits: jax.Array, rows: SamplingRows, state: SamplerState | None, mode: SamplingMode
) -> Any:
    """What a step does after the logits."""
    tokens = choose_tokens(logits, rows, state, mode)
    return tokens, token_logprobs(logits, tokens) if mode == SamplingMode.LOGPROBS else None


def make_state(num_rows: int, mode: SamplingMode) -> SamplerState | None:
    """The sampler's memory where a mode looks into it."""
    adjusted = mode >= SamplingMode.ADJUSTED
    return SamplerState.zeros(num_rows, VOCAB, NUM_RULES) if adjusted else None


def make_rows(num_rows: int, filters: Filters) -> SamplingRows:
    """Rows that all want the same."""
    everyone = functools.partial(jnp.full, num_rows)
    number = jnp.arange(num_rows, dtype=jnp.int32)
    return SamplingRows(
        slots=number,
        samples=everyone(True),
        seed=jnp.stack([number, number], axis=1).astype(jnp.uint32),
        output_index=number,
        top_k=everyone(filters.top_k),
        temperature=everyone(0.8),
        top_p=everyone(filters.top_p),
        min_p=everyone(filters.min_p),
        repetition_penalty=everyone(1.0),
        presence_penalty=everyone(0.0),
        frequency_penalty=everyone(0.0),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_logits(num_rows: int, kind: str) -> jax.Array:
    """[num_rows, VOCAB] float32."""
    key, other = jax.random.split(jax.random.key(0))
    normal = jax.random.normal(key, (num_rows, VOCAB), jnp.float32)
    if kind == "flat":
        return 0.5 * normal
    # One token in four thousand stands out, some of these far.
    tall = jax.random.exponential(other, normal.shape) - 8.3
    peaked = 2 * normal + 4 * jnp.maximum(tall, 0) + jnp.where(tall > 0, 8, 0)
    return peaked if kind == "peaked" else peaked.astype(jnp.bfloat16).astype(jnp.float32)


def compiled(num_rows: int, mode: SamplingMode) -> Callable[..., Any]:
    """The program of a number of rows and a mode."""
    logits = jax.ShapeDtypeStruct((num_rows, VOCAB), jnp.float32)
    rows = jax.eval_shape(lambda: make_rows(num_rows, Filters()))
    state = jax.eval_shape(lambda: make_state(num_rows, mode))
    return jax.jit(functools.partial(choose, mode=mode)).lower(logits, rows, state).compile()


def measure(case: Case, program: Callable[..., Any]) -> Result:
    """Time a compiled case."""
    logits = make_logits(case.num_rows, case.kind)
    rows = make_rows(case.num_rows, case.filters)
    state = make_state(case.num_rows, case.mode)
    _, runs = repeated(program, logits, rows, state)
    return Result(
        num_rows=case.num_rows,
        mode=case.mode.name,
        filters=str(case.filters),
        kind=case.kind,
        microseconds=median_microseconds(runs),
        summarise=median_microseconds(runs, "paged_summarise"),
        threshold=median_microseconds(runs, "paged_threshold"),
        kernels=len(runs[0]),
        wall=wall_microseconds(program, logits, rows, state),
    )


def wall_microseconds(program: Callable[..., Any], *args: Any) -> float:
    """From one call to the next, the best of some rounds."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready([program(*args) for _ in range(CALLS)])
        best = min(best, time.perf_counter() - began)
    return best / CALLS * 1e6


if __name__ == "__main__":
    main()
