"""From flags to a ready device: what an engine works out once, before it serves."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import jax
import jax.numpy as jnp

from paged.cache import read_pages
from paged.models.config import ModelConfig, resolve_dtype
from paged.models.loading import ModelSource
from paged.models.mesh import shares
from paged.models.offloading import OnHost, host_shapes
from paged.models.quantized import weight_bytes
from paged.models.registry import get_family
from paged.models.spread import check_devices
from paged.models.weights import for_device
from paged.pool import PagePool
from paged.runtime.about import StartClock
from paged.runtime.backend import slower_paths
from paged.runtime.compiler import Compiler
from paged.runtime.compiles import use_compile_cache
from paged.runtime.config import EngineConfig
from paged.runtime.device_probe import MEMORY_FRACTIONS
from paged.runtime.disk_pages import DiskPages
from paged.runtime.disk_tier import DiskTier
from paged.runtime.division import (
    DEVICE_RESERVE,
    memory_plan,
    num_bytes,
    scheduler_config,
    shapes_before_pages,
    weight_shapes,
    with_host_pages,
)
from paged.runtime.errors import ConfigError
from paged.runtime.lowering import processes_for
from paged.runtime.memory import (
    MemoryPlan,
    available_memory,
    check_host_memory,
    size_text,
)
from paged.runtime.placement import Placement, choose_devices
from paged.runtime.programs import step_memory
from paged.runtime.runner import StepRunner
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.steps import StepShapes
from paged.runtime.tuning import tilings_for
from paged.runtime.weight_offload import cost_report, layers_on_host

logger = logging.getLogger(__name__)

_GIB = 2**30
# GiB of pinned host memory that JAX takes at most unless told otherwise, and what it needs of that
# beside host pages: every transfer goes through such memory.
_PINNED_BY_DEFAULT = 64
_PINNED_FOR_OTHERS = 8
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def claim_devices(config: EngineConfig) -> tuple[jax.Device, ...]:
    """The devices, of whose memory JAX reserves the engine's share when it first looks at them.

    What the user has put into the environment wins. What is put there here does not stay: it would
    be the share of the processes that this one starts, too.
    """
    limits = {}
    if not any(name in os.environ for name in MEMORY_FRACTIONS):
        limits[MEMORY_FRACTIONS[0]] = str(config.gpu_memory_utilization)
    # Twice the weights that leave the device: what a step holds of them there is on the host too.
    pinned = ceil(config.kv_offloading_size + 2 * config.cpu_offload_gb) + _PINNED_FOR_OTHERS
    if pinned > _PINNED_BY_DEFAULT and _PINNED_LIMIT not in os.environ:
        limits[_PINNED_LIMIT] = str(pinned)
    os.environ |= limits
    try:
        return choose_devices(config.tensor_parallel_size)
    except (RuntimeError, AssertionError) as error:  # the latter without the plugin for GPUs
        wanted = os.environ.get("JAX_PLATFORMS") or "any platform"
        cause = f" ({error})".replace("\n", " ") if str(error) else ""
        raise ConfigError(
            f"JAX finds no device of {wanted}{cause}. Look at `nvidia-smi`, install paged[cuda12] "
            "or paged[cuda13], or set JAX_PLATFORMS=cpu to do without a GPU."
        ) from error
    finally:
        for name in limits:
            del os.environ[name]


def prepare(
    config: EngineConfig, source: ModelSource, clock: StartClock, *, progress: bool
) -> tuple[StepRunner, SchedulerConfig, MemoryPlan]:
    """Divide the memory, load the weights and compile every program.

    Args:
        clock: is told of the phases.

    Raises:
        ConfigError: the flags do not go together or do not fit the device. Nothing is loaded then,
            unless something else takes the device's memory meanwhile.
    """
    try:
        return _prepare(config, source, clock, progress=progress)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            "The device has run out of memory while the model was loaded. See with `nvidia-smi` "
            "whether something else uses it, and lower --gpu-memory-utilization "
            f"(it is {config.gpu_memory_utilization:g}), --max-num-batched-tokens or "
            "--max-num-seqs: see docs/failures.md#out-of-memory."
        ) from error


def _prepare(
    config: EngineConfig, source: ModelSource, clock: StartClock, *, progress: bool
) -> tuple[StepRunner, SchedulerConfig, MemoryPlan]:
    _check_page_folder(config.kv_offloading_dir)
    use_compile_cache(config.compile_cache_dir)
    with clock.phase("device"):
        devices = claim_devices(config)
    device = devices[0]
    source = _with_weights_on_host(config, source, device)
    on_host = source.on_host
    # Processes that have no device cannot be told which arguments are in its host's memory.
    with Compiler(0 if on_host else processes_for(devices), devices) as compiler:
        with clock.phase("memory"):
            shapes, dtype, memory = _divide_memory(
                config, source.config, devices, compiler, on_host=on_host, progress=progress
            )
        logger.info("%s", memory.report())
        tell_quantization(source.config, source.specs, dtype)
        if device.platform == "cpu":
            check_host_memory(memory, available_memory())
        described = weight_shapes(source.config, dtype, shapes.placement)
        if slower := slower_paths(shapes, dtype, device, described):
            logger.warning("Not the fastest way of %s: %s", device.device_kind, "; ".join(slower))
        with timed(f"Loaded {source.name}"), clock.phase("weights"):
            params = source.load(
                dtype, seed=config.seed, progress=progress, mesh=shapes.placement.mesh
            )
            params = for_device(params, device)
            jax.block_until_ready(params)
        with clock.phase("compile"):
            runner = StepRunner(shapes, params, compiler, progress=progress)
    scheduling = scheduler_config(config, shapes)
    if source.on_host:
        counts = len(source.on_host), source.config.num_layers
        seconds = runner.measure_smallest_step()
        logger.warning("%s", cost_report(*counts, memory.weights_on_host, seconds))
    if memory.num_host_pages:
        costs = runner.measure_loads()
        logger.info("%s", costs.report(memory.bytes_per_host_page))
        scheduling = replace(scheduling, load_costs=costs)
    return runner, scheduling, memory


def _with_weights_on_host(
    config: EngineConfig, source: ModelSource, device: jax.Device
) -> ModelSource:
    """The same model, the weights of some layers on the host if that is asked for."""
    dtype = resolve_dtype(config.dtype, source.config, device.platform)
    available = available_memory(swap=False)
    layers = source.specs.layers if config.cpu_offload_gb else ()
    on_host = layers_on_host(config.cpu_offload_gb, layers, dtype, available)
    return replace(source, on_host=on_host)


def _check_page_folder(folder: str | None) -> None:
    """Minutes later is late to hear that pages cannot be kept there. Raises ConfigError."""
    if folder is None:
        return
    try:
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with NamedTemporaryFile(dir=path):
            pass
    except (OSError, RuntimeError) as error:  # the latter of a user who has no home
        raise _unusable(error) from error


def _unusable(error: Exception) -> ConfigError:
    return ConfigError(f"--kv-offloading-dir cannot be used: {error}")


def open_disk_tier(
    config: EngineConfig, runner: StepRunner, pool: PagePool, scheduling: SchedulerConfig
) -> DiskTier | None:
    """The pages on disk, if they are asked for.

    Raises:
        ConfigError: their folder cannot be used.
    """
    if config.kv_offloading_dir is None:
        return None
    cache = runner.shapes.placement.cache_shapes(runner.shapes.cache)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    [stack] = jax.eval_shape(read_pages, cache, one)
    page = [jax.ShapeDtypeStruct(part.shape[1:], part.dtype) for part in stack]
    folder = Path(config.kv_offloading_dir).expanduser() / runner.fingerprint()
    size = int(config.kv_offloading_dir_size * _GIB)
    try:
        files = DiskPages(folder, size, page)
    except OSError as error:
        raise _unusable(error) from error
    logger.info(
        "%d pages in %s, which reads %.2f GB/s",
        *(len(files), folder, runner.shapes.bytes_per_host_page / files.seconds_per_page / 1e9),
    )
    return DiskTier(files, pool, runner, scheduling.windows, scheduling.load_costs)


def tell_quantization(model: ModelConfig, specs: Any, dtype: jnp.dtype) -> None:
    """Log what of the described weights is quantised and what is not, if anything is."""
    if model.quantization is None:
        return
    found = weight_bytes(specs, dtype)
    experts = f", of experts {size_text(found.experts)}" if found.experts else ""
    logger.info(
        "Quantized by %s: %s of weights; in %s: %s%s",
        model.quantization.name,
        size_text(found.quantized),
        dtype,
        size_text(found.plain),
        experts,
    )


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Log how long it took."""
    started = time.perf_counter()
    yield
    logger.info("%s in %.1f s", what, time.perf_counter() - started)


def free_memory(device: jax.Device) -> int:
    """Bytes that JAX may use on a device and that nothing in this process uses yet."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(
            f"{device.device_kind} does not report its memory. Give --kv-cache-memory-bytes."
        )
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def _divide_memory(
    config: EngineConfig,
    model: ModelConfig,
    devices: Sequence[jax.Device],
    compiler: Compiler,
    *,
    on_host: frozenset[int] = frozenset(),
    progress: bool = False,
) -> tuple[StepShapes, jnp.dtype, MemoryPlan]:
    """Give what weights, state and steps leave to pages, and settle every shape.

    Of several devices, all have the same: bytes are those of each.
    """
    device = devices[0]
    budget = None if device.platform == "cpu" else min(map(free_memory, devices))
    dtype = resolve_dtype(config.dtype, model, device.platform)
    check_devices(get_family(model.architecture).specs(model), model, len(devices))
    placement = Placement.on(devices, latents=model.latent_rank is not None)
    shapes = shapes_before_pages(config, model, placement, device, dtype, budget)
    seconds = config.attention_tuning_seconds
    tilings = tilings_for(shapes, dtype, device, seconds=seconds, memory=budget, progress=progress)
    params = host_shapes(weight_shapes(model, dtype, placement), on_host, device)
    weights_on_host = num_bytes([each for each in params.layers if isinstance(each, OnHost)])
    weights = num_bytes(shares(params)) - weights_on_host
    shapes = replace(shapes, tilings=tilings)
    available = available_memory(swap=False)
    available = None if available is None else available - weights_on_host
    shapes = with_host_pages(config, shapes, budget, available)
    steps = 0
    if budget is not None and config.kv_cache_memory_bytes is None:
        steps = step_memory(shapes, for_device(params, device), compiler) + DEVICE_RESERVE
    memory = memory_plan(
        config, shapes, budget, weights=weights, weights_on_host=weights_on_host, steps=steps
    )
    length = memory.max_model_len
    cache = replace(shapes.cache, num_pages=memory.num_pages)
    shapes = replace(
        shapes, model=shapes.model.for_length(length), cache=cache, max_model_len=length
    )
    return shapes, dtype, memory
