"""Decode steps of one model on one GPU and on several: how much faster, and what they exchange.

Each step is a forward program and the choice of each row's most likely token, over pages that lie
scattered, with random weights. Of a step it tells the time between two with nothing else to do
(wall) and, by the GPUs' own clocks (CUPTI), what kernels took on each GPU by their kind. Those of
kind "collectives" count from when a GPU begins to wait for the others.

    python benchmarks/tensor_parallel.py benchmarks/models/llama-3.1-70b --quantization fp8 \
        --sizes 1,2 --cases decode:1x1088,decode:32x1088,decode:256x512 --json scaling.json

A case is as in `step_kernels.py`, and has to fit into one GPU for a size of 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.gpu import gpu_arguments
from benchmarks.step_kernels import DTYPE, PAGE_SIZE, Case, Steps, measure
from paged.attention import default_backend
from paged.attention.tiling import BY_RULE
from paged.attention.tuned import TUNED
from paged.cache import PagedKVCache
from paged.models.loading import ModelSource, resolve_model
from paged.models.registry import get_family
from paged.models.weights import for_device
from paged.runtime.buckets import FEWEST_ROWS_ON_GPU, Buckets
from paged.runtime.config import QUANTIZATION_EXCLUDE
from paged.runtime.placement import COPIED, Placement
from paged.runtime.programs import abstract
from paged.runtime.sampler import SamplingMode
from paged.runtime.steps import StepShapes, forward, sample

CASES = ("decode:1x1088", "decode:32x1088", "decode:256x512")
MAX_NUM_SEQS, MAX_MODEL_LEN = 256, 8192


@dataclass(frozen=True)
class Programs:
    """Compiled programs of a case: the forward step, and the choice of tokens."""

    case: Case
    forward: Any
    sample: Any


def num_pages(cases: list[Case]) -> int:
    """Pages, the null page included, for the largest case."""
    return 1 + max(each.num_rows * -(-(each.context + 1) // PAGE_SIZE) for each in cases)


def step_shapes(source: ModelSource, placement: Placement, pages: int) -> StepShapes:
    """What each GPU sees."""
    model, device = source.config.share(placement.num_devices), jax.devices()[0]
    key = (model.head_dim, model.group_size, PAGE_SIZE, DTYPE.name)
    return StepShapes(
        family=get_family(model.architecture),
        model=model,
        cache=model.cache_spec(pages, PAGE_SIZE, DTYPE),
        buckets=Buckets.make(MAX_NUM_SEQS, MAX_NUM_SEQS, fewest_rows=FEWEST_ROWS_ON_GPU),
        max_model_len=MAX_MODEL_LEN,
        backend=default_backend(device),
        tilings=TUNED.get(device.device_kind, {}).get(key, BY_RULE),
        placement=placement,
    )


def compiled(case: Case, shapes: StepShapes, params: Any) -> Programs:
    """The programs of a case."""
    place, bucket = shapes.placement, case.bucket(shapes.buckets)
    slots = jax.eval_shape(shapes.slot_state)
    packed = jax.ShapeDtypeStruct((shapes.layout(bucket).size,), jnp.int32)
    inputs = (abstract(params), place.cache_shapes(shapes.cache), slots, packed)
    step = partial(forward, shapes=shapes, bucket=bucket)
    jobs = [place.job(step, inputs, (1, 2), out=(place.pages, COPIED, COPIED))]
    out = jax.eval_shape(jobs[0].function, *jobs[0].args)[2]
    rows = shapes.buckets.sampling_rows(case.num_rows)
    greedy = partial(sample, shapes=shapes, num_rows=rows, mode=SamplingMode.GREEDY)
    head = abstract(params).without_layers
    jobs.append(place.job(greedy, (head, slots, None, out.last_hidden, out.sampling), (1,)))
    made = [
        jax.jit(job.function, donate_argnums=job.donated).lower(*job.args).compile() for job in jobs
    ]
    return Programs(case, *made)


def figures(source: ModelSource, cases: list[Case], size: int) -> Iterator[dict[str, Any]]:
    """The cases on so many GPUs."""
    begin = time.perf_counter()
    placement = Placement.on(jax.devices()[:size])
    shapes = step_shapes(source, placement, num_pages(cases))
    params = source.load(DTYPE, seed=0, progress=False, mesh=placement.mesh)
    params = for_device(params, jax.devices()[0])
    loaded = time.perf_counter()
    with ThreadPoolExecutor(len(cases)) as threads:
        made = list(threads.map(lambda case: compiled(case, shapes, params), cases))
    seconds = f"loaded in {loaded - begin:.1f} s, compiled in {time.perf_counter() - loaded:.1f} s"
    print(f"{size} GPU(s): {seconds}", flush=True)
    cache: PagedKVCache = placement.zeros(shapes.cache)
    for each in made:
        steps = Steps(each.case, shapes, params, (each.forward, each.sample))
        steps.slots = placement.copied(steps.slots)
        steps.packed = placement.copied(steps.packed)
        figure, cache = measure(each.case, steps, cache)
        yield {"size": size, **per_gpu(figure, size)}
    for array in jax.tree.leaves((params, cache)):
        array.delete()


def per_gpu(figure: dict[str, Any], size: int) -> dict[str, Any]:
    """Figures of kernels on all GPUs, as of each."""
    kinds = {kind: ms / size for kind, ms in figure["kinds_ms"].items()}
    kernels = [(name, ms / size, launches / size) for name, ms, launches in figure["kernels"]]
    return figure | {
        "kinds_ms": kinds,
        "kernel_ms": figure["kernel_ms"] / size,
        "launches": figure["launches"] / size,
        "kernels": kernels,
    }


def show(figure: dict[str, Any], alone: float | None, top: int) -> None:
    """A line for a case, and its longest kernels."""
    kinds = " ".join(f"{name} {ms:.3f}" for name, ms in figure["kinds_ms"].items())
    faster = "" if alone is None else f", {alone / figure['wall_ms']:.2f} times one GPU"
    print(
        f"{figure['case']} on {figure['size']}: wall {figure['wall_ms']:.3f} ms{faster}, "
        f"kernels {figure['kernel_ms']:.3f} ({kinds}), launches {figure['launches']:.0f}",
        flush=True,
    )
    for name, ms, launches in figure["kernels"][:top]:
        print(f"    {1e3 * ms:9.1f} us {launches:7.1f} x {name[:90]}", flush=True)


def main() -> None:
    """Read the arguments, and tell each case as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--sizes", default="1,2", help="numbers of GPUs")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--quantization", help="fp8, int8 or int4 weights")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--top", type=int, default=6, help="kernels to print of each case")
    args = gpu_arguments(parser)
    source = resolve_model(args.model, load_format="dummy")
    if args.quantization:
        source = source.quantized(args.quantization, QUANTIZATION_EXCLUDE)
    cases = [Case.parse(text) for text in args.cases.split(",")]
    alone: dict[str, float] = {}
    told = []
    for size in map(int, args.sizes.split(",")):
        for figure in figures(source, cases, size):
            if size == 1:
                alone[figure["case"]] = figure["wall_ms"]
            show(figure, None if size == 1 else alone.get(figure["case"]), args.top)
            told.append(figure)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
