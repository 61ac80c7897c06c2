"""From flags to a ready device: what an engine works out once, before it serves."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import batched
from math import ceil
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import jax
import jax.numpy as jnp

from paged.groups import group_layers
from paged.models.config import ModelConfig, resolve_dtype
from paged.models.loading import ModelSource
from paged.models.mesh import shares
from paged.models.offloading import OnHost, host_shapes
from paged.models.quantized import weight_bytes
from paged.models.spread import check_devices
from paged.models.stages import Stage, divide
from paged.models.weights import for_device, num_bytes
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
    cache_of,
    memory_plan,
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
from paged.runtime.pipeline import Pipeline
from paged.runtime.placement import Placement, choose_devices, least_of_all, own_devices
from paged.runtime.programs import step_memory
from paged.runtime.runner import StepRunner
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.step_device import Device, StepDevice, alone
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

    Raises:
        ConfigError: they are not there, or not joined with those of other processes.
    """
    if config.nnodes > 1 and not jax.distributed.is_initialized():
        raise ConfigError(
            "--nnodes is for `paged serve` and its engine process, which is started again when a "
            "host is lost: leave it out here"
        )
    limits = {}
    if not any(name in os.environ for name in MEMORY_FRACTIONS):
        limits[MEMORY_FRACTIONS[0]] = str(config.gpu_memory_utilization)
    # Twice the weights that leave the device: what a step holds of them there is on the host too.
    pinned = ceil(config.kv_offloading_size + 2 * config.cpu_offload_gb) + _PINNED_FOR_OTHERS
    if pinned > _PINNED_BY_DEFAULT and _PINNED_LIMIT not in os.environ:
        limits[_PINNED_LIMIT] = str(pinned)
    os.environ |= limits
    try:
        return choose_devices(config.tensor_parallel_size, config.pipeline_parallel_size)
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
    config: EngineConfig,
    source: ModelSource,
    clock: StartClock,
    lead: Callable[[Device], Device] = alone,
    *,
    progress: bool,
) -> tuple[StepRunner, SchedulerConfig, MemoryPlan]:
    """Divide the memory, load the weights, compile every program, and measure what is to be known.

    Args:
        clock: is told of the phases.
        lead: makes of the device one that has others follow, if there are any.

    Raises:
        ConfigError: see `prepare_device`.
    """
    device, memory = prepare_device(config, source, clock, progress=progress)
    with within_memory(config):
        with clock.phase("compile"):
            runner = StepRunner(lead(device))
        scheduling = scheduler_config(config, runner.shapes)
        if memory.weights_on_host:
            layers = device.params.layers
            counts = sum(isinstance(each, OnHost) for each in layers), len(layers)
            seconds = runner.measure_smallest_step()
            logger.warning("%s", cost_report(*counts, memory.weights_on_host, seconds))
        if memory.num_host_pages:
            costs = runner.measure_loads()
            logger.info("%s", costs.report(memory.bytes_per_host_page))
            scheduling = replace(scheduling, load_costs=costs)
    return runner, scheduling, memory


def prepare_device(
    config: EngineConfig, source: ModelSource, clock: StartClock, *, progress: bool
) -> tuple[Device, MemoryPlan]:
    """Divide the memory, load the weights and compile every program.

    Args:
        clock: is told of the phases.

    Raises:
        ConfigError: the flags do not go together or do not fit the device. Nothing is loaded then,
            unless something else takes the device's memory meanwhile.
    """
    with within_memory(config):
        return _prepare_device(config, source, clock, progress=progress)


@contextmanager
def within_memory(config: EngineConfig) -> Iterator[None]:
    """Tell in one line if a device has run out of memory while an engine starts.

    Raises:
        ConfigError: it has.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            "The device has run out of memory while the engine was started. See with `nvidia-smi` "
            "whether something else uses it, and lower --gpu-memory-utilization "
            f"(it is {config.gpu_memory_utilization:g}), --max-num-batched-tokens, --max-num-seqs "
            "or, if you gave it, --kv-cache-memory-bytes: see docs/failures.md#out-of-memory."
        ) from error


def _prepare_device(
    config: EngineConfig, source: ModelSource, clock: StartClock, *, progress: bool
) -> tuple[Device, MemoryPlan]:
    _check_page_folder(config.kv_offloading_dir)
    use_compile_cache(config.compile_cache_dir)
    with clock.phase("device"):
        devices = claim_devices(config)
    device = own_devices(devices)[0]
    dtype = resolve_dtype(config.dtype, source.config, device.platform)
    source = _with_weights_on_host(config, source, dtype)
    with ExitStack() as compilers:
        parts = _parts(config, source, devices, dtype, compilers)
        with clock.phase("memory"):
            divided = _agreed(
                [_divide_memory(config, source, part, dtype, progress=progress) for part in parts]
            )
        tell_quantization(source.config, source.specs, dtype)
        loaded: list[StepDevice] = []
        for part, (shapes, memory) in zip(parts, divided, strict=True):
            logger.info("%s", memory.report())
            if device.platform == "cpu":
                check_host_memory(memory, available_memory())
            loaded.append(_loaded(config, source, clock, part, shapes, dtype, progress))
        if parts[0].stage is None:
            return loaded[0], memory
        with clock.phase("compile"):
            return _pipeline(config, source, devices, loaded, dtype), memory


@dataclass(frozen=True)
class _Part:
    """What this process computes on some of its devices: the model, or a stage of it.

    Attributes:
        devices: that share it, those of other processes among them.
    """

    stage: Stage | None
    devices: Sequence[jax.Device]
    compiler: Compiler


def _parts(
    config: EngineConfig,
    source: ModelSource,
    devices: Sequence[jax.Device],
    dtype: jnp.dtype,
    compilers: ExitStack,
) -> list[_Part]:
    parts = []
    stages = _stages(config, source.config, dtype) or (None,)
    for stage, shared in zip(stages, batched(devices, len(devices) // len(stages)), strict=True):
        if own_devices(shared):
            # Processes that have no device cannot be told which arguments are in its host's
            # memory, nor which device of several they are for.
            apart = 0 if source.on_host or stage is not None else processes_for(shared)
            compiler = compilers.enter_context(Compiler(apart, shared))
            parts.append(_Part(stage, shared, compiler))
    return parts


def _stages(config: EngineConfig, model: ModelConfig, dtype: jnp.dtype) -> tuple[Stage, ...]:
    """Those of a pipeline; none where the model is in one piece."""
    number = config.pipeline_parallel_size
    return divide(model.num_layers, number, model.hidden_size, dtype) if number > 1 else ()


def _agreed(
    divided: Sequence[tuple[StepShapes, MemoryPlan]],
) -> Sequence[tuple[StepShapes, MemoryPlan]]:
    """The same with as many pages, and sequences as long, in all stages: those of the least."""
    if divided[0][0].stage is None:
        return divided
    num_pages = least_of_all(min(memory.num_pages for _, memory in divided))
    length = least_of_all(min(memory.max_model_len for _, memory in divided))
    return [
        (
            replace(
                shapes,
                model=shapes.model.for_length(length),
                cache=replace(shapes.cache, num_pages=num_pages),
                max_model_len=length,
            ),
            replace(memory, num_pages=num_pages, max_model_len=length),
        )
        for shapes, memory in divided
    ]


def _loaded(
    config: EngineConfig,
    source: ModelSource,
    clock: StartClock,
    part: _Part,
    shapes: StepShapes,
    dtype: jnp.dtype,
    progress: bool,
) -> StepDevice:
    """The weights of a part on its devices, and its programs."""
    device = own_devices(part.devices)[0]
    described = weight_shapes(source.config, dtype, shapes.placement, part.stage)
    if slower := slower_paths(shapes, dtype, device, described):
        logger.warning("Not the fastest way of %s: %s", device.device_kind, "; ".join(slower))
    with timed(f"Loaded {source.name}"), clock.phase("weights"):
        mesh, stage = shapes.placement.mesh, part.stage
        # What is loaded has no name here: the memory of a weight is free once it is made anew.
        params = for_device(
            source.load(dtype, seed=config.seed, progress=progress, mesh=mesh, stage=stage), device
        )
        jax.block_until_ready(params)
    with clock.phase("compile"):
        return StepDevice(shapes, params, part.compiler, progress=progress)


def _pipeline(
    config: EngineConfig,
    source: ModelSource,
    devices: Sequence[jax.Device],
    loaded: Sequence[StepDevice],
    dtype: jnp.dtype,
) -> Pipeline:
    """All stages as one device; of those of other processes no more than their shapes."""
    stages = _stages(config, source.config, dtype)
    some = loaded[0].shapes
    groups = group_layers(source.config.windows, some.max_model_len)
    placements = [
        Placement.on(each, latents=some.placement.latents, pinned=True)
        for each in batched(devices, len(devices) // len(stages))
    ]
    shapes = [
        replace(some, stage=stage, placement=place, cache=cache_of(stage, some.cache, groups))
        for stage, place in zip(stages, placements, strict=True)
    ]
    last = for_device(
        weight_shapes(source.config, dtype, placements[-1], stages[-1]), own_devices(devices)[0]
    )
    own = {each.shapes.stage.index: each for each in loaded if each.shapes.stage is not None}
    return Pipeline(own, shapes, last)


def _with_weights_on_host(
    config: EngineConfig, source: ModelSource, dtype: jnp.dtype
) -> ModelSource:
    """The same model, the weights of some layers on the host if that is asked for."""
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
    folder = Path(config.kv_offloading_dir).expanduser() / runner.fingerprint()
    size = int(config.kv_offloading_dir_size * _GIB)
    try:
        files = DiskPages(folder, size, runner.page_parts)
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
    config: EngineConfig, source: ModelSource, part: _Part, dtype: jnp.dtype, *, progress: bool
) -> tuple[StepShapes, MemoryPlan]:
    """Give what weights, state and steps leave to pages, and settle every shape.

    Of several devices, all have the same: bytes are those of each.
    """
    model, stage, own = source.config, part.stage, own_devices(part.devices)
    device = own[0]
    on_cpu = device.platform == "cpu"
    budget = None if on_cpu else least_of_all(min(map(free_memory, own)))
    check_devices(source.specs, model, len(part.devices))
    latents = model.latent_rank is not None
    placement = Placement.on(part.devices, latents=latents, pinned=stage is not None)
    shapes = shapes_before_pages(config, model, placement, device, dtype, budget, stage)
    # Each process might find something else to be fastest, and all must run the same.
    is_alone = config.nnodes == 1 and stage is None
    seconds = config.attention_tuning_seconds if is_alone else 0.0
    tilings = tilings_for(shapes, dtype, device, seconds=seconds, memory=budget, progress=progress)
    described = weight_shapes(model, dtype, placement, stage)
    params = host_shapes(described, source.on_host, device)
    weights_on_host = num_bytes([each for each in params.layers if isinstance(each, OnHost)])
    weights = num_bytes(shares(params)) - weights_on_host
    shapes = replace(shapes, tilings=tilings)
    available = available_memory(swap=False)
    available = None if available is None else available - weights_on_host
    shapes = with_host_pages(config, shapes, budget, available)
    steps = 0
    if budget is not None and config.kv_cache_memory_bytes is None:
        steps = step_memory(shapes, for_device(params, device), part.compiler) + DEVICE_RESERVE
    memory = memory_plan(
        config, shapes, budget, weights=weights, weights_on_host=weights_on_host, steps=steps
    )
    length = memory.max_model_len
    cache = replace(shapes.cache, num_pages=memory.num_pages)
    shapes = replace(
        shapes, model=shapes.model.for_length(length), cache=cache, max_model_len=length
    )
    return shapes, memory
