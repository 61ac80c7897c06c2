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
from typing import Any

import jax
import jax.numpy as jnp

from paged.cache import KV_DTYPES, CacheSpec
from paged.groups import LayerGroup, group_layers, most_pages
from paged.models.config import ModelConfig, resolve_dtype
from paged.models.loading import ModelSource
from paged.models.mesh import shares
from paged.models.offloading import OnHost, host_shapes
from paged.models.quantized import weight_bytes
from paged.models.registry import get_family
from paged.models.spread import check_devices, spread_shapes
from paged.models.stages import Stage, divide
from paged.models.weights import for_device
from paged.runtime.about import StartClock
from paged.runtime.backend import choose_backend, slower_paths
from paged.runtime.buckets import FEWEST_ROWS_ON_GPU, Buckets
from paged.runtime.compiler import Compiler
from paged.runtime.compiles import use_compile_cache
from paged.runtime.config import EngineConfig
from paged.runtime.device_probe import MEMORY_FRACTIONS
from paged.runtime.errors import ConfigError
from paged.runtime.lanes import Lanes
from paged.runtime.lowering import processes_for
from paged.runtime.memory import (
    MemoryPlan,
    available_memory,
    check_host_memory,
    fit_model_len,
    host_pages,
    page_memory,
    size_text,
)
from paged.runtime.page_folder import check_page_folder
from paged.runtime.pipeline import Pipeline
from paged.runtime.placement import Placement, choose_devices, least_of_all, own_devices
from paged.runtime.programs import step_memory
from paged.runtime.runner import StepRunner
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.step_device import Device, StepDevice
from paged.runtime.steps import MOST_MOVED, StepShapes
from paged.runtime.tuning import tilings_for
from paged.runtime.weight_offload import cost_report, layers_on_host

logger = logging.getLogger(__name__)

_GIB = 2**30
_CPU_KV_MEMORY = _GIB
# GiB of pinned host memory that JAX takes at most unless told otherwise, and what it needs of that
# beside host pages: every transfer goes through such memory.
_PINNED_BY_DEFAULT = 64
_PINNED_FOR_OTHERS = 8
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# For pages on their way to the host or back: those that a step of 8,192 tokens fills, in a model of
# 8B parameters. Of a smaller device a share.
_TRANSIT = _GIB
_TRANSIT_SHARE = 1 / 32
# Kernels' workspaces and allocator rounding, which no program reports.
_DEVICE_RESERVE = _GIB // 2
# What an engine may use, by default, of a GPU of 70 GiB: from here on it runs 1024 sequences.
_LARGE_BUDGET = 63 * _GIB


@dataclass(frozen=True)
class StepLimits:
    """Sequences and tokens in a step, as flags or the platform's defaults say."""

    max_num_seqs: int
    max_num_batched_tokens: int


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
    lead: Callable[[Device], Device],
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
    with clock.phase("compile"):
        runner = StepRunner(lead(device))
    scheduling = _scheduling(config, runner.shapes)
    if memory.weights_on_host:
        layers = device.params.layers
        counts = sum(isinstance(each, OnHost) for each in layers), len(layers)
        seconds = runner.measure_smallest_step()
        logger.warning("%s", cost_report(*counts, memory.weights_on_host, seconds))
    if memory.num_host_pages:
        costs = runner.measure_loads()
        logger.info("%s", costs.report(memory.bytes_per_page))
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
    try:
        return _prepare_device(config, source, clock, progress=progress)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            "The device has run out of memory while the model was loaded. See with `nvidia-smi` "
            "whether something else uses it, and lower --gpu-memory-utilization "
            f"(it is {config.gpu_memory_utilization:g}), --max-num-batched-tokens or "
            "--max-num-seqs."
        ) from error


def _prepare_device(
    config: EngineConfig, source: ModelSource, clock: StartClock, *, progress: bool
) -> tuple[Device, MemoryPlan]:
    check_page_folder(config.kv_offloading_dir)
    use_compile_cache(config.compile_cache_dir)
    with clock.phase("device"):
        devices = claim_devices(config)
    device = own_devices(devices)[0]
    source = _with_weights_on_host(config, source, device)
    dtype = resolve_dtype(config.dtype, source.config, device.platform)
    with ExitStack() as compilers:
        parts = _parts(config, source, devices, dtype, compilers)
        with clock.phase("memory"):
            divided = _agreed([_divided(config, source, part, progress) for part in parts])
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


def _divided(
    config: EngineConfig, source: ModelSource, part: _Part, progress: bool
) -> tuple[StepShapes, MemoryPlan]:
    shapes, _, memory = _divide_memory(
        config,
        source.config,
        part.devices,
        part.compiler,
        on_host=source.on_host,
        progress=progress,
        stage=part.stage,
    )
    return shapes, memory


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
        params = source.load(dtype, seed=config.seed, progress=progress, mesh=mesh, stage=stage)
        params = for_device(params, device)
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
        replace(some, stage=stage, placement=place, cache=_cache_of(stage, some.cache, groups))
        for stage, place in zip(stages, placements, strict=True)
    ]
    last = for_device(
        weight_shapes(source.config, dtype, placements[-1], stages[-1]), own_devices(devices)[0]
    )
    own = {each.shapes.stage.index: each for each in loaded if each.shapes.stage is not None}
    return Pipeline(own, shapes, last)


def _cache_of(stage: Stage | None, cache: CacheSpec, groups: tuple[LayerGroup, ...]) -> CacheSpec:
    """The pages of the layers that are in a stage, of groups of all layers."""
    if stage is None:
        return replace(cache, groups=groups, num_layers=max(len(each.layers) for each in groups))
    own = stage.own(groups)
    return replace(
        cache,
        groups=own,
        num_layers=max(len(each.layers) for each in own),
        of_layers=sum(len(each.layers) for each in groups),
    )


def _with_weights_on_host(
    config: EngineConfig, source: ModelSource, device: jax.Device
) -> ModelSource:
    """The same model, the weights of some layers on the host if that is asked for."""
    dtype = resolve_dtype(config.dtype, source.config, device.platform)
    available = available_memory(swap=False)
    layers = source.specs.layers if config.cpu_offload_gb else ()
    on_host = layers_on_host(config.cpu_offload_gb, layers, dtype, available)
    return replace(source, on_host=on_host)


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


def _scheduling(config: EngineConfig, shapes: StepShapes) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=shapes.buckets.max_num_seqs,
        max_num_batched_tokens=shapes.buckets.mixed[-1],
        max_model_len=shapes.max_model_len,
        policy=config.scheduling_policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        windows=shapes.cache.windows,
        lanes=Lanes(
            long_prompt=config.long_prompt_threshold,
            share=config.short_request_share,
            most_long=config.max_long_partial_prefills,
        ),
    )


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Log how long it took."""
    started = time.perf_counter()
    yield
    logger.info("%s in %.1f s", what, time.perf_counter() - started)


def step_limits(config: EngineConfig, budget: int | None) -> StepLimits:
    """What flags say, or else what suits the platform (as their help says).

    Args:
        budget: bytes the engine may use of its device, None on a CPU.
    """
    if budget is None:
        seqs, tokens = 32, 512
    else:
        seqs, tokens = (1024 if budget >= _LARGE_BUDGET else 256), 8192
    seqs = config.max_num_seqs or seqs
    return StepLimits(seqs, config.max_num_batched_tokens or max(tokens, seqs))


def free_memory(device: jax.Device) -> int:
    """Bytes that JAX may use on a device and that nothing in this process uses yet."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(
            f"{device.device_kind} does not report its memory. Give --kv-cache-memory-bytes."
        )
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def _check_limits(config: EngineConfig, limits: StepLimits, max_model_len: int) -> StepLimits:
    """Limits that go together, none larger than the sequences can fill."""
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    if tokens < seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({tokens}) must be at least --max-num-seqs ({seqs}), "
            "so that every sequence can advance in each step."
        )
    if not config.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"Without chunked prefill a prompt must fit one step: --max-num-batched-tokens "
            f"({tokens}) is smaller than --max-model-len ({max_model_len}). Raise the one or lower "
            "the other, or leave chunked prefill on."
        )
    return replace(limits, max_num_batched_tokens=min(tokens, seqs * max_model_len))


def _divide_memory(
    config: EngineConfig,
    model: ModelConfig,
    devices: Sequence[jax.Device],
    compiler: Compiler,
    *,
    on_host: frozenset[int] = frozenset(),
    progress: bool = False,
    stage: Stage | None = None,
) -> tuple[StepShapes, jnp.dtype, MemoryPlan]:
    """Give what weights, state and steps leave to pages, and settle every shape.

    Of several devices, all have the same: bytes are those of each.
    """
    own_memory, device = own_devices(devices), own_devices(devices)[0]
    on_cpu = device.platform == "cpu"
    budget = None if on_cpu else least_of_all(min(map(free_memory, own_memory)))
    dtype = resolve_dtype(config.dtype, model, device.platform)
    check_devices(get_family(model.architecture).specs(model), model, len(devices))
    latents = model.latent_rank is not None
    placement = Placement.on(devices, latents=latents, pinned=stage is not None)
    own = model.share(len(devices))
    shapes = _shapes_before_pages(config, own, device, dtype, budget, stage)
    shapes = replace(shapes, placement=placement)
    # Each process might find something else to be fastest, and all must run the same.
    is_alone = config.nnodes == 1 and stage is None
    seconds = config.attention_tuning_seconds if is_alone else 0.0
    tilings = tilings_for(shapes, dtype, device, seconds=seconds, memory=budget, progress=progress)
    described = weight_shapes(model, dtype, shapes.placement, stage)
    params = host_shapes(described, on_host, device)
    weights_on_host = _num_bytes([each for each in params.layers if isinstance(each, OnHost)])
    weights = _num_bytes(shares(params)) - weights_on_host
    shapes = replace(shapes, tilings=tilings)
    shapes = _with_host_pages(config, shapes, budget, taken=weights_on_host)
    transit = shapes.transit_room * shapes.cache.bytes_per_page
    state = _num_bytes(jax.eval_shape(lambda: (shapes.slot_state(), shapes.sampler_state())))
    if budget is None or config.kv_cache_memory_bytes is not None:
        steps, kv_bytes = 0, config.kv_cache_memory_bytes or _CPU_KV_MEMORY
    else:
        steps = step_memory(shapes, for_device(params, device), compiler) + _DEVICE_RESERVE
        kv_bytes = page_memory(budget, weights, state, steps + transit)
    from_share = budget is not None and config.kv_cache_memory_bytes is None
    length = _fitting_length(config, shapes, kv_bytes, from_share=from_share)
    memory = MemoryPlan(
        budget=budget,
        weights=weights,
        state=state,
        steps=steps,
        bytes_per_page=shapes.cache.bytes_per_page,
        page_size=config.block_size,
        num_pages=kv_bytes // shapes.cache.bytes_per_page,
        max_model_len=length,
        pages_per_sequence=most_pages(shapes.cache.windows, length, 1, config.block_size),
        num_host_pages=shapes.num_host_pages,
        transit=transit,
        weights_on_host=weights_on_host,
        num_devices=len(devices),
    )
    cache = replace(shapes.cache, num_pages=memory.num_pages)
    own = own.for_length(length)
    return replace(shapes, model=own, cache=cache, max_model_len=length), dtype, memory


def weight_shapes(
    model: ModelConfig, dtype: jnp.dtype, placement: Placement, stage: Stage | None = None
) -> Any:
    """The shapes of a model's weights, or of a stage's, as all devices have them."""
    specs = get_family(model.architecture).specs(model)
    return spread_shapes(specs, model, dtype, placement.mesh, stage)


def _shapes_before_pages(
    config: EngineConfig,
    model: ModelConfig,
    device: jax.Device,
    dtype: jnp.dtype,
    budget: int | None,
    stage: Stage | None,
) -> StepShapes:
    """Shapes with the number of pages still open: the longest sequence's worth."""
    wanted = config.max_model_len
    length = model.context_length if wanted in (None, -1) else wanted
    limits = _check_limits(config, step_limits(config, budget), length)
    groups = group_layers(model.windows, length)
    cache = CacheSpec(
        num_layers=model.num_layers,
        num_pages=-(-length // config.block_size) + 1,
        page_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype(config.kv_cache_dtype, dtype, device, latents=model.latent_rank is not None),
        latent_rank=model.latent_rank,
    )
    return StepShapes(
        family=get_family(model.architecture),
        model=model,
        cache=_cache_of(stage, cache, groups),
        buckets=Buckets.make(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            fewest_rows=1 if device.platform == "cpu" else FEWEST_ROWS_ON_GPU,
        ),
        max_model_len=length,
        backend=choose_backend(config.attention_backend, device),
        stage=stage,
    )


def _with_host_pages(
    config: EngineConfig, shapes: StepShapes, budget: int | None, *, taken: int
) -> StepShapes:
    """Shapes that know how many pages the host has, and how many can be on their way at once.

    Args:
        taken: bytes of the host's memory that weights will take.
    """
    bytes_per_page = shapes.cache.bytes_per_page
    wanted = int(config.kv_offloading_size * _GIB)
    if not wanted:
        return shapes
    available = available_memory(swap=False)
    available = None if available is None else available - taken
    on_host = bytes_per_page * shapes.placement.num_devices
    num_pages = host_pages(wanted, on_host, available)
    transit = min(_TRANSIT, int((budget or 0) * _TRANSIT_SHARE))
    room = max(transit // bytes_per_page, MOST_MOVED)
    return replace(shapes, num_host_pages=num_pages, transit_room=room)


def _fitting_length(
    config: EngineConfig, shapes: StepShapes, kv_bytes: int, *, from_share: bool
) -> int:
    """The longest sequence that pages of so many bytes hold, see `fit_model_len`."""
    windows, chunk = shapes.cache.windows, _scheduling(config, shapes).longest_chunk
    bytes_per_page = shapes.cache.bytes_per_page
    return fit_model_len(
        config.max_model_len,
        shapes.model.context_length,
        num_pages=kv_bytes // bytes_per_page,
        pages_of=lambda length: most_pages(windows, length, chunk, config.block_size),
        kv_bytes=kv_bytes,
        bytes_per_page=bytes_per_page,
        from_share=from_share,
    )


def kv_dtype(
    name: str, dtype: jnp.dtype, device: jax.Device, *, latents: bool = False
) -> jnp.dtype:
    """The element type of pages by the name of a flag, for a model of `dtype`.

    Raises:
        ConfigError: the device cannot read it, or pages of latents are not there in 8 bits.
    """
    wanted = dtype if name == "auto" else KV_DTYPES[name]
    if latents and wanted.itemsize == 1:
        raise ConfigError(
            f"--kv-cache-dtype {name} is not there for the latents that this model keeps in its "
            "pages. Use auto, bfloat16, float16 or float32."
        )
    capability = getattr(device, "compute_capability", None)
    if wanted == jnp.float8_e4m3fn and capability is not None and float(capability) < 8.9:
        raise ConfigError(
            f"--kv-cache-dtype {name} needs a GPU of compute capability 8.9 or above, and "
            f"{device.device_kind} has {capability}. Use int8 or fp8_e5m2."
        )
    return wanted


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
