"""Time the experts of a mixture on this GPU, and find the fastest tilings of their products.

First it checks the kernels against float64, over groups of rows of all sorts. Then, for a model's
sizes and each number of tokens, it times the tilings of the grouped products that are worth a try,
and with the best of them the whole mixture (`paged.models.experts.mix`): its router, the order of
rows, both products and the sum of answers. Several layers in a row have weights and routers of
their own, so that weights come from memory. All by the GPU's own clock (CUPTI).

The floor is the time to read the weights of the experts that are used, or to multiply, at the
speed that this very card reads and multiplies (`benchmarks.gpu.ceilings`).

    python benchmarks/expert_kernels.py --models qwen3-30b-a3b --tokens 1 32 4096 --seconds 90 \
        --json found.json --table paged/matmul/tuned.py
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.floors import Ceilings
from benchmarks.gpu import (
    DTYPE,
    ceilings,
    gpu_arguments,
    kernels,
    median_microseconds,
    random,
    repeated,
)
from benchmarks.mixtures import ERROR, MODELS, THREADS, Sizes, check, layer_weights
from benchmarks.tables import short, with_products
from benchmarks.tune_matmul import timed
from paged.matmul import (
    MOST_ROWS,
    ROW_UNIT,
    Groups,
    Tiling,
    grouped_matmul,
    in_groups,
    in_groups_at_once,
)
from paged.matmul.estimate import grouped_tilings
from paged.matmul.groups import work_list
from paged.matmul.tiling import ROWS
from paged.matmul.tuned import GROUPED, GroupedProduct
from paged.models.experts import Mixture, mix

TOKENS = (1, 8, 32, 128, 256, 1024, 4096)
LAYERS, RUNS = 3, 5
# Of the time, what is left for the layers when the tilings are timed.
SHARE_OF_TILINGS = 0.75


def main() -> None:
    """Check, then time what was asked for, and write it."""
    options = parse_arguments()
    deadline = time.monotonic() + options.seconds
    if not options.no_check:
        check()
    card = ceilings()
    print(
        f"{jax.devices()[0].device_kind}: reads {card.bytes_per_second / 1e12:.2f} TB/s, "
        f"multiplies {card.flop_per_second / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    told: list[dict[str, Any]] = []
    share = (deadline - time.monotonic()) / len(options.models)
    for name in options.models:
        until = time.monotonic() + share
        for figure in measured(name, MODELS[name], options.tokens, card, until, options):
            told.append(figure)
            if options.json:
                options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.table:
        options.table.write_text(with_products("GROUPED", GROUPED))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--no-check", action="store_true", help="believe that results are right")
    parser.add_argument("--as-tuned", action="store_true", help="time no tilings, the layers alone")
    parser.add_argument("--seconds", type=float, default=600, help="begin nothing after so long")
    parser.add_argument("--json", type=Path, help="write all that is measured here")
    parser.add_argument("--table", type=Path, help="write the table here, with what it had")
    return gpu_arguments(parser)


def measured(
    name: str,
    sizes: Sizes,
    tokens: Sequence[int],
    card: Ceilings,
    until: float,
    options: argparse.Namespace,
) -> Sequence[dict[str, Any]]:
    """What is found out about a model, told as it comes."""
    weights = [layer_weights(sizes, 10 * index) for index in range(LAYERS)]
    told: list[dict[str, Any]] = []
    if not options.as_tuned:
        limit = time.monotonic() + SHARE_OF_TILINGS * (until - time.monotonic())
        told += tune(name, sizes, tokens, weights, limit)
    told += [time_orders(name, sizes, count) for count in tokens if time.monotonic() < until]
    told += time_layers(name, sizes, tokens, weights, card, until)
    for leaf in jax.tree.leaves(weights):
        leaf.delete()
    return told


def tune(
    name: str, sizes: Sizes, tokens: Sequence[int], weights: Sequence[Mixture], until: float
) -> list[dict[str, Any]]:
    """Time the tilings of both products, and enter the best into the table of this process."""
    orders = {count: random_order(sizes, count) for count in tokens}
    wanted = [
        (count, part, tiling)
        for count in tokens
        for part, (gated, x, k, n) in sizes.products.items()
        for tiling in grouped_tilings(len(orders[count].rows), x, k, n, gated=gated)
    ]
    programs = compiled(
        wanted, lambda case: compile_product(sizes, orders[case[0]], *case[1:]), until - 15
    )
    told = []
    best: dict[GroupedProduct, dict[int, Tiling]] = defaultdict(dict)
    for count in tokens:
        for part, product in sizes.products.items():
            mine = {case[2]: each for case, each in programs.items() if case[:2] == (count, part)}
            if not mine or time.monotonic() > until:
                continue
            figure = time_tilings(name, part, count, orders[count], mine, product, weights)
            told.append(figure)
            best[product][len(orders[count].rows)] = figure["tilings"][0]["tiling"]
    kind = GROUPED.setdefault(jax.devices()[0].device_kind, {})
    for product, rows in best.items():
        kind[product] = tuple(sorted({**dict(kind.get(product, ())), **rows}.items()))
    return [plain(figure) for figure in told]


def plain(figure: dict[str, Any]) -> dict[str, Any]:
    """A figure without objects, to be written."""
    tilings = [{**each, "tiling": asdict(each["tiling"])} for each in figure["tilings"]]
    return {**figure, "tilings": tilings}


def random_order(sizes: Sizes, tokens: int) -> Any:
    """Rows of tokens that choose at random."""
    scores = jax.random.uniform(jax.random.key(tokens), (tokens, sizes.experts))
    owners = jax.lax.top_k(scores, sizes.chosen)[1].reshape(-1)
    return in_groups(owners, sizes.experts, most=tokens, unit=ROW_UNIT)


def compiled(
    cases: Sequence[Any], compile_one: Callable[[Any], Any], until: float
) -> dict[Any, Any]:
    """The programs of those that compile in time."""

    def attempt(case: Any) -> Any:
        if time.monotonic() > until:
            return None
        try:
            return compile_one(case)
        except Exception as problem:  # told, so that the others are still measured
            print(f"does not compile: {case}: {problem}"[:500], flush=True)
            return None

    with ThreadPoolExecutor(THREADS) as threads:
        programs = dict(zip(cases, threads.map(attempt, cases), strict=True))
    found = {case: program for case, program in programs.items() if program is not None}
    print(f"{len(found)} of {len(cases)} programs compiled", flush=True)
    return found


def compile_product(sizes: Sizes, order: Any, part: str, tiling: Tiling) -> Any:
    """A program that multiplies the same rows by the weights of each layer."""
    gated, x, k, n = sizes.products[part]
    one = jax.jit(functools.partial(grouped_matmul, tiling=tiling))

    def program(rows: jax.Array, weights: list[jax.Array], groups: Groups) -> list[jax.Array]:
        return [one(rows, weight, groups) for weight in weights]

    rows = jax.ShapeDtypeStruct((len(order.rows), k), DTYPE)
    weight = jax.ShapeDtypeStruct((x, k, 2, n) if gated else (x, k, n), DTYPE)
    groups = jax.eval_shape(lambda: order.groups)
    return jax.jit(program).lower(rows, [weight] * LAYERS, groups).compile()


def time_tilings(
    name: str,
    part: str,
    tokens: int,
    order: Any,
    programs: dict[Tiling, Any],
    product: GroupedProduct,
    weights: Sequence[Mixture],
) -> dict[str, Any]:
    """Time a product's tilings; the fastest first, those that are wrong not at all."""
    gated, x, k, n = product
    rows = random(tokens, (len(order.rows), k))
    experts: list[Any] = [getattr(layer, part).kernel for layer in weights]
    kernels_of = [each if gated else each.reshape(x, k, n) for each in experts]
    runs: list[Callable[[], Any]] = [
        functools.partial(each, rows, kernels_of, order.groups) for each in programs.values()
    ]
    used, num_rows = int(jnp.sum(order.groups.sizes > 0)), int(jnp.sum(order.groups.sizes))
    results = [np.asarray(run()[-1][:num_rows], np.float32) for run in runs]
    middle = np.median(results, axis=0) if len(results) > 2 else results[0]
    errors = [float(np.linalg.norm(each - middle) / np.linalg.norm(middle)) for each in results]
    num_bytes, flop = 2 * used * k * n * (1 + gated), 2 * num_rows * k * n * (1 + gated)
    guess = 1e3 * max(num_bytes / 4e12, flop / 6e14) + 0.003
    times = zip(programs, timed(runs, guess, LAYERS), errors, strict=True)
    timings: list[dict[str, Any]] = [
        {"tiling": tiling, "microseconds": microseconds, "error": wrong}
        for tiling, microseconds, wrong in times
    ]
    found = sorted(timings, key=lambda each: (each["error"] > ERROR, each["microseconds"]))
    fastest = found[0]["microseconds"] / 1e6
    print(
        f"{name} {part} {tokens} tokens, {num_rows} rows of {used} experts: "
        f"{num_bytes / fastest / 1e12:.2f} TB/s, {flop / fastest / 1e12:.0f} TFLOP/s | "
        + " | ".join(
            f"{each['microseconds']:.1f} {short(each['tiling'])}"
            + (f" WRONG {each['error']:.1e}" if each["error"] > ERROR else "")
            for each in found
        ),
        flush=True,
    )
    return {
        "model": name,
        "part": part,
        "tokens": tokens,
        "rows": len(order.rows),
        "tilings": found,
    }


def time_orders(name: str, sizes: Sizes, tokens: int) -> dict[str, Any]:
    """Time what puts rows in groups: one kernel, and XLA's with the list of tiles."""
    owners = jax.random.randint(jax.random.key(tokens), (tokens * sizes.chosen,), 0, sizes.experts)

    def by_xla(owners: jax.Array) -> Any:
        order = in_groups(owners, sizes.experts, most=tokens, unit=ROW_UNIT)
        return order, work_list(order.groups, len(order.rows), ROWS)

    ways: dict[str, Any] = {"XLA": by_xla}
    if len(owners) <= 4 * MOST_ROWS:
        ways["one kernel"] = lambda owners: in_groups_at_once(owners, sizes.experts, most=tokens)
    found = {
        way: median_microseconds(repeated(jax.jit(function), owners)[1])
        for way, function in ways.items()
    }
    said = ", ".join(f"{microseconds:.1f} by {way}" for way, microseconds in found.items())
    print(f"{name} order of {len(owners)} rows: {said}", flush=True)
    return {"model": name, "part": "order", "tokens": tokens, **found}


def time_layers(
    name: str,
    sizes: Sizes,
    tokens: Sequence[int],
    weights: Sequence[Mixture],
    card: Ceilings,
    until: float,
) -> list[dict[str, Any]]:
    """Time whole mixtures."""
    programs = compiled(tokens, lambda count: compile_layers(sizes, count, weights), until - 5)
    told = []
    for count, program in programs.items():
        if time.monotonic() < until:
            told.append(time_layer(name, sizes, count, weights, program, card))
    return told


def compile_layers(sizes: Sizes, tokens: int, weights: Sequence[Mixture]) -> Any:
    """A program of some layers that are mixtures alone; it says which experts are used, too."""

    @jax.jit
    def layer(params: Mixture, x: jax.Array) -> jax.Array:
        meta: Any = SimpleNamespace(write_index=jnp.arange(tokens))
        return x + mix(params, sizes.routing, x, meta, sizes.activation)

    def program(x: jax.Array, weights: Sequence[Mixture]) -> list[jax.Array]:
        outputs = [x]
        for params in weights:
            outputs.append(layer(params, outputs[-1]))
        return outputs

    x = jax.ShapeDtypeStruct((tokens, sizes.hidden), DTYPE)
    return jax.jit(program).lower(x, jax.eval_shape(lambda: list(weights))).compile()


def time_layer(
    name: str,
    sizes: Sizes,
    tokens: int,
    weights: Sequence[Mixture],
    program: Any,
    card: Ceilings,
) -> dict[str, Any]:
    """Time the layers of a program: all kernels, the products among them, and the floor."""
    x = random(tokens, (tokens, sizes.hidden))
    outputs = program(x, list(weights))
    used = [
        len(
            np.unique(jax.lax.top_k(params.router(inputs, jnp.dtype(jnp.float32)), sizes.chosen)[1])
        )
        for params, inputs in zip(weights, outputs[:-1], strict=True)
    ]
    numbers = 3 * sizes.hidden * sizes.inner
    floor = 1e6 * max(
        2 * numbers * statistics.mean(used) / card.bytes_per_second,
        2 * numbers * tokens * sizes.chosen / card.flop_per_second,
    )
    runs = []
    for _ in range(RUNS):
        runs.append(kernels(lambda: jax.block_until_ready(program(x, list(weights)))))
    total = median_microseconds(runs) / LAYERS
    products = median_microseconds(runs, "paged_matmul") / LAYERS
    others: dict[str, float] = defaultdict(float)
    for kernel, milliseconds in runs[-1]:
        if "paged_matmul" not in kernel:
            others[kernel] += 1e3 * milliseconds / LAYERS
    finite = bool(jnp.isfinite(outputs[-1]).all())
    print(
        f"{name} layer {tokens} tokens, {statistics.mean(used):.0f} experts: {total:.1f} us = "
        f"{products:.1f} products + {total - products:.1f} others in "
        f"{len(runs[-1]) / LAYERS:.0f} kernels; floor {floor:.1f} = {floor / total:.2f}"
        + ("" if finite else " NOT FINITE"),
        flush=True,
    )
    longest = sorted(others.items(), key=lambda pair: -pair[1])
    for kernel, microseconds in longest[:8]:
        print(f"    {microseconds:8.1f} us {kernel[:90]}", flush=True)
    return {
        "model": name,
        "part": "layer",
        "tokens": tokens,
        "used": used,
        "microseconds": total,
        "products": products,
        "floor": floor,
        "kernels": len(runs[-1]) / LAYERS,
        "others": dict(longest),
    }


if __name__ == "__main__":
    main()
