"""Where the time of a compiled step goes: each bucket's kernels by the GPU's own clock (CUPTI).

Compiles the forward programs of some step shapes for a model of random weights, runs each many
times over pages that lie scattered in a large cache, and tells for each shape: the time between two
steps with nothing else to do (wall), the sum of its kernels, its floor (`floors.py`) on this very
card, and its kernels by kind.

    python benchmarks/step_kernels.py benchmarks/models/llama-3.1-8b --cases decode:32x1088 \
        --json steps.json --hlo FOLDER

A case is `decode:ROWSxCONTEXT`, or `mixed:ROWSxCONTEXT+CHUNKSxTOKENS`: decoding rows, and chunks of
prompts that start at position 0.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.floors import ModelWork, Request, floor_seconds
from benchmarks.gpu import Kernels, ceilings, kernels
from paged.attention import BACKENDS, default_backend
from paged.attention.tiling import BY_RULE
from paged.attention.tuned import TUNED
from paged.cache import PagedKVCache
from paged.models.loading import ModelSource, resolve_model
from paged.models.registry import get_family
from paged.models.weights import for_device, param_bytes
from paged.runtime.buckets import FEWEST_ROWS_ON_GPU, Bucket, Buckets
from paged.runtime.config import QUANTIZATION_EXCLUDE
from paged.runtime.programs import abstract
from paged.runtime.sampler import SamplingMode
from paged.runtime.steps import SlotState, StepShapes, forward, sample

CASES = (
    "decode:1x1088",
    "decode:8x1088",
    "decode:32x1088",
    "decode:128x1088",
    "decode:256x1088",
    "decode:1024x364",
    "mixed:0x0+27x300",
    "mixed:1000x364+24x300",
    "mixed:0x0+4x2048",
    "mixed:0x0+54x300",
)
PAGE_SIZE = 16
NUM_PAGES = 30_000
MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_MODEL_LEN = 1024, 16384, 8192
RUNS = 12
DTYPE = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Case:
    """A step: rows that decode at a context, and chunks of prompts."""

    name: str
    rows: int
    context: int
    chunks: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Case:
        found = re.fullmatch(r"(?:decode|mixed):(\d+)x(\d+)(?:\+(\d+)x(\d+))?", text)
        if not found:
            raise SystemExit(f"not a case: {text!r}; see --help")
        return cls(text, *(int(number or 0) for number in found.groups()))

    @property
    def num_tokens(self) -> int:
        return self.rows + self.chunks * self.length

    @property
    def num_rows(self) -> int:
        return self.rows + self.chunks

    def bucket(self, buckets: Buckets) -> Bucket:
        """The smallest shape that holds it."""
        wanted = self.num_tokens
        if self.chunks:
            size = min(size for size in buckets.mixed if size >= wanted)
            return Bucket(size, min(size, buckets.max_num_seqs), False)
        size = min(size for size in buckets.decode if size >= wanted)
        return Bucket(size, size, True)

    @property
    def requests(self) -> list[Request]:
        """Its part of the work: a token more of what is in pages, or a prompt's first."""
        decoding = Request(self.context, 2, cached=self.context)
        return [decoding] * self.rows + [Request(self.length, 1)] * self.chunks


def pack_case(case: Case, shapes: StepShapes, bucket: Bucket) -> NDArray[np.int32]:
    """The packed array of a case (see `paged.runtime.batch`): slot r is row r."""
    layout = shapes.layout(bucket)
    rng = np.random.default_rng(0)
    packed = np.zeros(layout.size, np.int32)
    packed[: case.num_tokens] = rng.integers(0, shapes.model.vocab_size, case.num_tokens)
    table = packed[bucket.num_tokens : layout.updates_start].reshape(3, bucket.num_rows)
    table[0, : case.num_rows] = np.arange(case.num_rows)
    table[1, : case.num_rows] = [1] * case.rows + [case.length] * case.chunks
    table[2, : case.rows] = case.context
    packed[layout.updates_start : layout.sampling_start] = np.iinfo(np.int32).max
    return packed


def scattered_slots(shapes: StepShapes, case: Case) -> SlotState:
    """Slots whose page tables lie scattered over all pages, no page in two places."""
    longest = max(case.context + 1, case.length)
    pages = -(-longest // PAGE_SIZE)
    rng = np.random.default_rng(1)
    order = rng.permutation(np.arange(1, shapes.cache.num_pages))[: case.num_rows * pages]
    num_slots = shapes.buckets.max_num_seqs
    tables = np.zeros((num_slots, shapes.pages_per_sequence), np.int32)
    tables[: case.num_rows, :pages] = order.reshape(case.num_rows, pages)
    return SlotState((jnp.asarray(tables),), jnp.zeros(num_slots, jnp.int32))


class Steps:
    """Launches one compiled step over and over; the cache goes through all of them."""

    def __init__(self, case: Case, shapes: StepShapes, params: Any, programs: Any) -> None:
        self.params, (self.forward, self.sample) = params, programs
        self.slots = scattered_slots(shapes, case)
        self.packed = jax.device_put(pack_case(case, shapes, case.bucket(shapes.buckets)))

    def run(self, cache: PagedKVCache, count: int) -> PagedKVCache:
        for _ in range(count):
            cache, self.slots, out = self.forward(self.params, cache, self.slots, self.packed)
            head = self.params.without_layers
            self.slots, _, _ = self.sample(head, self.slots, None, out.last_hidden, out.sampling)
        jax.block_until_ready(self.slots)
        return cache


def by_name(found: Kernels) -> list[tuple[str, float, int]]:
    """(name, milliseconds of a step, launches of a step) of each kernel, the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, milliseconds in found:
        times[name].append(milliseconds)
    rows = [(name, sum(each) / RUNS, len(each) // RUNS) for name, each in times.items()]
    return sorted(rows, key=lambda row: -row[1])


def kind(name: str) -> str:
    """What sort of kernel it is, by its name."""
    if re.search(r"nccl|^psum|all_?reduce|all_?gather", name, re.IGNORECASE):
        return "collectives"
    if re.search(r"gemm|nvjet|cutlass|cublas|splitK|dot|paged_matmul", name):
        return "products"
    if "paged" in name:
        return "attention"
    return "other"


def measure(case: Case, steps: Steps, cache: PagedKVCache) -> tuple[dict[str, Any], PagedKVCache]:
    """Time a compiled case."""
    cache = steps.run(cache, 3)
    walls = []
    for _ in range(3):
        start = time.perf_counter()
        cache = steps.run(cache, RUNS)
        walls.append((time.perf_counter() - start) / RUNS)
    box = [cache]

    def traced() -> None:
        box[0] = steps.run(box[0], RUNS)

    found = by_name(kernels(traced))
    kinds: dict[str, float] = defaultdict(float)
    for name, ms, _ in found:
        kinds[kind(name)] += ms
    figures = {
        "case": case.name,
        "wall_ms": 1e3 * statistics.median(walls),
        "kernel_ms": sum(kinds.values()),
        "launches": sum(launches for _, _, launches in found),
        "kinds_ms": dict(kinds),
        "kernels": found,
    }
    return figures, box[0]


def compile_case(case: Case, shapes: StepShapes, params: Any, hlo: Path | None) -> tuple[Any, Any]:
    """The forward and the greedy sampling program of a case."""
    bucket = case.bucket(shapes.buckets)
    cache = PagedKVCache.shapes(shapes.cache)
    slots = jax.eval_shape(shapes.slot_state)
    step = functools.partial(forward, shapes=shapes, bucket=bucket)
    packed = jax.ShapeDtypeStruct((shapes.layout(bucket).size,), jnp.int32)
    inputs = (abstract(params), cache, slots, packed)
    program = jax.jit(step, donate_argnums=(1, 2)).lower(*inputs).compile()
    if hlo:
        (hlo / f"{case.name.replace(':', '-')}.txt").write_text(program.as_text() or "")
    out = jax.eval_shape(step, *inputs)[2]
    num_rows = shapes.buckets.sampling_rows(case.num_rows)
    greedy = functools.partial(sample, shapes=shapes, num_rows=num_rows, mode=SamplingMode.GREEDY)
    sampler = jax.jit(greedy, donate_argnums=1).lower(
        abstract(params).without_layers, slots, None, out.last_hidden, out.sampling
    )
    return program, sampler.compile()


def step_shapes(args: argparse.Namespace, source: ModelSource) -> StepShapes:
    """Those of a server with room for every case."""
    model, device = source.config, jax.devices()[0]
    key = (model.head_dim, model.num_heads // model.num_kv_heads, PAGE_SIZE, DTYPE.name)
    return StepShapes(
        family=get_family(model.architecture),
        model=model,
        cache=model.cache_spec(NUM_PAGES, PAGE_SIZE, DTYPE),
        buckets=Buckets.make(MAX_NUM_SEQS, MAX_NUM_TOKENS, fewest_rows=FEWEST_ROWS_ON_GPU),
        max_model_len=MAX_MODEL_LEN,
        backend=args.backend or default_backend(device),
        tilings=TUNED.get(device.device_kind, {}).get(key, BY_RULE),
    )


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compile all cases in parallel, then time one after the other."""
    cases = [Case.parse(text) for text in args.cases.split(",")]
    source = resolve_model(args.model, load_format="dummy")
    work, card = ModelWork.of(Path(args.model)), ceilings()
    if args.quantization:
        source = source.quantized(args.quantization, QUANTIZATION_EXCLUDE)
        read = replace(source.specs, embedding=()) if source.specs.head else source.specs
        work = replace(work, weight_bytes=param_bytes(read, DTYPE))
    shapes = step_shapes(args, source)
    params = source.load(DTYPE, seed=0, progress=False)
    if not args.xla_products:
        params = for_device(params, jax.devices()[0])
    start = time.perf_counter()
    with ThreadPoolExecutor(12) as threads:
        compiled = list(
            threads.map(lambda case: compile_case(case, shapes, params, args.hlo), cases)
        )
    print(f"compiled {len(cases)} cases in {time.perf_counter() - start:.1f} s", flush=True)
    cache = PagedKVCache.zeros(shapes.cache)
    for case, programs in zip(cases, compiled, strict=True):
        figure, cache = measure(case, Steps(case, shapes, params, programs), cache)
        yield {**figure, "floor_ms": 1e3 * floor_seconds(work, card, case.requests)}


def main() -> None:
    """Read the arguments, and tell each case as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--hlo", type=Path, help="folder for the compiled programs' text")
    parser.add_argument("--backend", choices=BACKENDS, help="of attention; default: the fastest")
    parser.add_argument("--xla-products", action="store_true", help="leave products to XLA")
    parser.add_argument("--quantization", help="fp8, int8 or int4 weights")
    parser.add_argument("--top", type=int, default=8, help="kernels to print of each case")
    args = parser.parse_args()
    told = []
    for figure in figures(args):
        show(figure, args.top)
        told.append(figure)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")


def show(figure: dict[str, Any], top: int) -> None:
    """A line for the case, one for its kinds of kernels, and its longest kernels."""
    kinds = " ".join(f"{name} {ms:.3f}" for name, ms in figure["kinds_ms"].items())
    print(
        f"{figure['case']}: wall {figure['wall_ms']:.3f} ms, kernels {figure['kernel_ms']:.3f} "
        f"({kinds}), launches {figure['launches']}, floor {figure['floor_ms']:.3f} "
        f"= {figure['floor_ms'] / figure['wall_ms']:.2f}",
        flush=True,
    )
    for name, ms, launches in figure["kernels"][:top]:
        print(f"    {1e3 * ms:9.1f} us {launches:5d} x {name[:90]}", flush=True)


if __name__ == "__main__":
    main()
