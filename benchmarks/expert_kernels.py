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
import importlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.floors import Ceilings
from benchmarks.gpu import DTYPE, ceilings, kernels, median_microseconds, random, repeated
from benchmarks.tune_matmul import short, timed
from paged.cache import DROPPED
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
from paged.models.activations import ClampedSwiglu
from paged.models.experts import Activation, HopperExperts, Mixture, Routing, mix
from paged.models.weights import Dense

TOKENS = (1, 8, 32, 128, 256, 1024, 4096)
LAYERS, RUNS, THREADS = 3, 5, 12
# Far from the exact result, relative to its norm: bfloat16 rounds to 2e-3 of it, each time.
ERROR = 1e-2
# Of the time, what is left for the layers when the tilings are timed.
SHARE_OF_TILINGS = 0.75


@dataclass(frozen=True)
class Sizes:
    """A model's mixtures.

    Attributes:
        experts, chosen: how many there are, and of these how many a token chooses.
        hidden, inner: D, and F of each expert.
        activation: of the experts.
        bias: they have biases.
    """

    experts: int
    chosen: int
    hidden: int
    inner: int
    activation: Activation = "silu"
    bias: bool = False

    @property
    def routing(self) -> Routing:
        """How tokens choose."""
        return Routing(self.experts, self.chosen, self.inner, renormalise=True)

    @property
    def fused(self) -> bool:
        """The kernel applies the activation."""
        return self.activation == "silu" and not self.bias

    @property
    def products(self) -> dict[str, GroupedProduct]:
        """The products of an expert: (gated, X, K, N)."""
        inner = self.inner if self.fused else 2 * self.inner
        return {
            "gate_up": (self.fused, self.experts, self.hidden, inner),
            "down": (False, self.experts, self.inner, self.hidden),
        }


MODELS = {
    "mixtral-8x7b": Sizes(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768),
    "gpt-oss-20b": Sizes(32, 4, 2880, 2880, ClampedSwiglu(1.702, 7.0), bias=True),
    "qwen1.5-moe-a2.7b": Sizes(60, 4, 2048, 1408),
}


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
        options.table.write_text(table_source())


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
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU, but JAX runs on {jax.default_backend()}")
    return options


def check() -> None:
    """Say how far all sorts of products, and whole mixtures, are from exact results."""
    cases: list[Any] = [
        functools.partial(product_error, sizes, gated, tiling)
        for sizes in ([8, 0, 16, 64, 0, 200], [0, 0, 8], [0, 264, 0], [72] * 8, [0] * 4)
        for gated in (False, True)
        for tiling in tilings_to_check(gated)
    ]
    clamped = ClampedSwiglu(1.702, 7.0)
    cases += [
        functools.partial(mixture_error, sizes, tokens)
        for sizes in (Sizes(16, 4, 512, 448), Sizes(8, 2, 320, 192, clamped, bias=True))
        for tokens in (1, 13, 120, 600, 2000)
    ]
    start = time.monotonic()
    with ThreadPoolExecutor(THREADS) as threads:
        errors = list(threads.map(lambda case: case(), cases))
    for case, found in zip(cases, errors, strict=True):
        if not found < ERROR:
            print(f"WRONG by {found:.1e}: {case.func.__name__} {case.args}", flush=True)
    seconds = time.monotonic() - start
    print(f"{len(cases)} checks: worst error {max(errors):.1e}, in {seconds:.0f} s", flush=True)


def tilings_to_check(gated: bool) -> list[Tiling]:
    """Of each sort one."""
    few, many = (grouped_tilings(m, 1, 512, 448, gated=gated) for m in (8, 512))
    return [few[0], few[-1], *many[:3], *([] if gated else [Tiling(widths=(64,), splits=2)])]


def product_error(sizes: Sequence[int], gated: bool, tiling: Tiling) -> float:
    """Of one product in groups of these sizes, relative to the norm of the exact one."""
    k, n, rows = 512, 448, sum(sizes)
    rng = np.random.default_rng(rows)
    shape = (len(sizes), k, 2, n) if gated else (len(sizes), k, n)
    x = jnp.asarray(rng.normal(size=(rows + 16, k)), DTYPE)
    w = jnp.asarray(rng.normal(size=shape) / k**0.5, DTYPE)
    groups = Groups.of(jnp.asarray(sizes, jnp.int32), max(8, *sizes))
    found = jax.jit(functools.partial(grouped_matmul, tiling=tiling))(x, w, groups)
    wide = np.asarray(x, np.float64), np.asarray(w, np.float64)
    ends = np.cumsum(sizes)
    parts = [
        np.tensordot(wide[0][end - size : end], weight, 1)
        for size, end, weight in zip(sizes, ends, wide[1], strict=True)
    ]
    exact = np.concatenate(parts)
    if gated:
        exact = exact[:, 0] / (1 + np.exp(-exact[:, 0])) * exact[:, 1]
    difference = np.linalg.norm(np.asarray(found, np.float64)[:rows] - exact)
    return float(difference / max(np.linalg.norm(exact), 1e-9))


def mixture_error(sizes: Sizes, tokens: int) -> float:
    """Of a mixture, relative to the norm of the exact one, of which some tokens are padding."""
    params, padding = layer_weights(sizes, tokens), tokens // 4
    x = random(tokens, (tokens, sizes.hidden))
    meta: Any = SimpleNamespace(write_index=jnp.arange(tokens).at[tokens - padding :].set(DROPPED))
    routing = sizes.routing
    found = jax.jit(lambda params, x: mix(params, routing, x, meta, sizes.activation))(params, x)
    shares, chosen = routing.choose(params.router(x, jnp.dtype(jnp.float32)))
    weights: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    exact = np.zeros((tokens, sizes.hidden))
    for token in range(tokens - padding):
        for share, expert in zip(np.asarray(shares[token]), np.asarray(chosen[token]), strict=True):
            row = np.asarray(x[token], np.float64)
            answer = exact_answer(weights, int(expert), row, sizes)
            exact[token] += float(share) * answer
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


def exact_answer(weights: Any, expert: int, row: np.ndarray, sizes: Sizes) -> np.ndarray:
    """What an expert makes of a row, in float64."""
    both = np.tensordot(row, weights.gate_up.kernel[expert], 1)
    both = both + weights.gate_up.bias[expert] if sizes.bias else both
    gate, up = both
    if isinstance(sizes.activation, ClampedSwiglu):
        alpha, limit = sizes.activation.alpha, sizes.activation.limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
        inner = gate / (1 + np.exp(-alpha * gate)) * up
    else:
        inner = gate / (1 + np.exp(-gate)) * up
    answer = inner @ weights.down.kernel[expert]
    return answer + weights.down.bias[expert] if sizes.bias else answer


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


def layer_weights(sizes: Sizes, seed: int) -> Mixture:
    """Random weights of a layer."""
    x, d, f = sizes.experts, sizes.hidden, sizes.inner
    kind = jax.devices()[0].device_kind
    inner, outer = (random(seed + 3, (x, 2, f)), random(seed + 4, (x, d)))
    return Mixture(
        router=Dense(random(seed, (d, x), 1 / d)),
        gate_up=HopperExperts(
            random(seed + 1, (x, d, 2, f), 1 / d), inner if sizes.bias else None, device_kind=kind
        ),
        down=HopperExperts(
            random(seed + 2, (x, f, d), 1 / f), outer if sizes.bias else None, device_kind=kind
        ),
    )


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


def table_source() -> str:
    """The module `paged.matmul.tuned` with another table of grouped products."""
    path = Path(importlib.import_module("paged.matmul.tuned").__file__ or "")
    head = path.read_text().partition("GROUPED: ")[0]
    lines = ["GROUPED: dict[str, dict[GroupedProduct, tuple[tuple[int, Tiling], ...]]] = {"]
    for kind, products in GROUPED.items():
        lines.append(f'    "{kind}": {{')
        for product, rows in products.items():
            lines.append(f"        {product}: (")
            lines += [f"            ({most}, {short(tiling)})," for most, tiling in rows]
            lines.append("        ),")
        lines.append("    },")
    return head + "\n".join([*lines, "}"]) + "\n"


if __name__ == "__main__":
    main()
