"""The tilings of an engine's attention: from the table, or found at its first start and kept."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from paged.attention.tiling import (
    BY_RULE,
    MosaicDecode,
    MosaicPrefill,
    Tilings,
    TritonDecode,
    TritonPrefill,
)
from paged.attention.tuned import TUNED
from paged.attention.tuning.search import fastest, num_candidates, search
from paged.attention.tuning.timer import POOL_BYTES, GpuTimer
from paged.attention.tuning.workloads import Case, Layer, cases
from paged.models.loading.progress import progress as report
from paged.runtime.kept_files import keep, load, path_for
from paged.runtime.program_store import kept_once
from paged.runtime.steps import StepShapes

logger = logging.getLogger(__name__)

# The part of the memory that is free before anything is loaded, for the pages of the timing.
_PART_FOR_POOL = 4
_KERNELS = {
    kind.__name__: kind for kind in (MosaicDecode, MosaicPrefill, TritonDecode, TritonPrefill)
}


def tilings_for(
    shapes: StepShapes,
    dtype: jnp.dtype,
    device: jax.Device,
    *,
    seconds: float,
    memory: int | None,
    progress: bool,
) -> Tilings:
    """What is known to be fastest for a model in `dtype`; nothing where kernels go by their rule.

    The rule is for what runs no kernels (a CPU), for what is not meant to be fast (float32), and
    for what nobody has timed and nobody shall: for want of time, or of a folder to keep it in.

    Args:
        seconds: that may go into timing what neither the table nor the folder has.
        memory: bytes that are free on the device, None on a CPU.
    """
    if memory is None or shapes.backend == "xla" or dtype.itemsize != 2:
        return BY_RULE
    layer = Layer(shapes.model.num_heads, shapes.cache, dtype, shapes.backend)
    if (known := TUNED.get(device.device_kind, {}).get(layer.heads.key)) is not None:
        return known
    limits = shapes.buckets.max_num_seqs, shapes.buckets.mixed[-1], shapes.max_model_len
    steps = cases(*limits)
    path = path_for((layer.heads, layer.num_heads, layer.backend, steps), "tilings")
    if path is None or seconds == 0:
        return BY_RULE
    kept = load(path, partial(_read, layer, steps))
    return kept if kept is not None else _find(path, layer, steps, seconds, memory, progress)


def _find(
    path: Path, layer: Layer, steps: list[Case], seconds: float, memory: int, progress: bool
) -> Tilings:
    """Time the kernels, and keep what is found."""
    started = time.perf_counter()
    total = num_candidates(layer, steps)
    try:
        timer = GpuTimer(layer, min(POOL_BYTES, memory // _PART_FOR_POOL))
        try:
            bar = report(total, "Tuning attention", " programs", show=progress)
            with kept_once(), bar as advance:
                found = search(layer, steps, timer, seconds=seconds, advance=advance)
        finally:
            timer.close()
    except Exception as error:  # of the GPU's clock, which may be another profiler's
        logger.warning("Attention is not tuned, and goes by its rule: %s", error)
        return BY_RULE
    tilings = fastest(layer, found)
    keep(path, msgspec.json.encode(_as_lists(tilings)))
    timed = sum(map(len, found.values()))
    spent = time.perf_counter() - started
    logger.info("Tuned attention in %.1f s: %d of %d candidates timed", spent, timed, total)
    return tilings


def _read(layer: Layer, steps: list[Case], kept: bytes) -> Tilings:
    """What a file holds. Raises ValueError if that cannot have been found here, or for damage."""
    tilings = _from_lists(msgspec.json.decode(kept))
    possible = {tiling for case in steps for tiling in case.candidates(layer)}
    strange = {tiling for _, tiling in (*tilings.decode, *tilings.prefill)} - possible
    if strange:
        raise ValueError(f"it holds {strange}")
    return tilings


def _as_lists(tilings: Tilings) -> dict[str, list[Any]]:
    """For a file: each tiling as its size, the name of its kind, and its fields."""
    return {
        name: [[size, type(tiling).__name__, asdict(tiling)] for size, tiling in entries]
        for name, entries in vars(tilings).items()
    }


def _from_lists(lists: dict[str, list[Any]]) -> Tilings:
    def entries(name: str) -> tuple[tuple[int, Any], ...]:
        return tuple((size, _KERNELS[kind](**fields)) for size, kind, fields in lists[name])

    return Tilings(entries("decode"), entries("prefill"))
