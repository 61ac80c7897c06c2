"""How flags and a budget become shapes and pages, whether the devices are there or not.

An engine that starts asks here, and so does who plans one: nothing but numbers is looked at, and of
a device no more than what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from paged.cache import KV_DTYPES, CacheSpec
from paged.groups import LayerGroup, group_layers, most_pages
from paged.models.config import ModelConfig
from paged.models.registry import get_family
from paged.models.spread import spread_shapes
from paged.models.stages import Stage
from paged.models.weights import num_bytes
from paged.runtime.backend import choose_backend
from paged.runtime.buckets import FEWEST_ROWS_ON_GPU, Buckets
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.lanes import Lanes
from paged.runtime.memory import (
    MemoryPlan,
    check_length,
    fit_model_len,
    host_pages,
    page_memory,
)
from paged.runtime.placement import Placement
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.steps import MOST_MOVED, StepShapes

_GIB = 2**30
_CPU_KV_MEMORY = _GIB
# For pages on their way to the host or back: those that a step of 8,192 tokens fills, in a model of
# 8B parameters. Of a smaller device a share.
_TRANSIT = _GIB
_TRANSIT_SHARE = 1 / 32
# Kernels' workspaces and allocator rounding, which no program reports.
DEVICE_RESERVE = _GIB // 2
# What an engine may use, by default, of a GPU of 70 GiB: from here on it runs 1024 sequences.
_LARGE_BUDGET = 63 * _GIB


@dataclass(frozen=True)
class StepLimits:
    """Sequences and tokens in a step, as flags or the platform's defaults say."""

    max_num_seqs: int
    max_num_batched_tokens: int


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


def scheduler_config(config: EngineConfig, shapes: StepShapes) -> SchedulerConfig:
    """What the scheduler is told."""
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
        step_sizes=shapes.buckets.mixed,
        num_stages=config.pipeline_parallel_size,
    )


def weight_shapes(
    model: ModelConfig, dtype: jnp.dtype, placement: Placement, stage: Stage | None = None
) -> Any:
    """The shapes of a model's weights, or of a stage's, as all devices have them."""
    specs = get_family(model.architecture).specs(model)
    return spread_shapes(specs, model, dtype, placement.mesh, stage)


def shapes_before_pages(
    config: EngineConfig,
    model: ModelConfig,
    placement: Placement,
    device: jax.Device,
    dtype: jnp.dtype,
    budget: int | None,
    stage: Stage | None = None,
) -> StepShapes:
    """Shapes with the number of pages still open: the longest sequence's worth.

    Raises:
        ConfigError: flags that do not go together, or with the model.
    """
    model = model.share(placement.num_devices)
    wanted = config.max_model_len
    length = model.context_length if wanted in (None, -1) else wanted
    check_length(length, model.context_length)
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
        cache=cache_of(stage, cache, groups),
        buckets=Buckets.make(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            fewest_rows=1 if device.platform == "cpu" else FEWEST_ROWS_ON_GPU,
        ),
        max_model_len=length,
        backend=choose_backend(config.attention_backend, device),
        placement=placement,
        stage=stage,
    )


def cache_of(stage: Stage | None, cache: CacheSpec, groups: tuple[LayerGroup, ...]) -> CacheSpec:
    """The pages of a stage's layers, of groups of all layers; of all of them without a stage."""
    if stage is None:
        return replace(cache, groups=groups, num_layers=max(len(each.layers) for each in groups))
    own = stage.own(groups)
    return replace(
        cache,
        groups=own,
        num_layers=max(len(each.layers) for each in own),
        of_layers=sum(len(each.layers) for each in groups),
    )


def with_host_pages(
    config: EngineConfig, shapes: StepShapes, budget: int | None, available: int | None
) -> StepShapes:
    """Shapes that know how many pages the host has, and how many can be on their way at once.

    Args:
        available: bytes of the host's memory, see `available_memory`.
    """
    bytes_per_page = shapes.cache.bytes_per_page
    wanted = int(config.kv_offloading_size * _GIB)
    if not wanted and config.kv_transfer_port is None:
        return shapes
    num_pages = host_pages(wanted, shapes.bytes_per_host_page, available)
    transit = min(_TRANSIT, int((budget or 0) * _TRANSIT_SHARE))
    room = max(transit // bytes_per_page, MOST_MOVED)
    return replace(shapes, num_host_pages=num_pages, transit_room=room)


def memory_plan(
    config: EngineConfig,
    shapes: StepShapes,
    budget: int | None,
    *,
    weights: int,
    weights_on_host: int,
    steps: int,
) -> MemoryPlan:
    """What weights, state and steps leave to pages, and the longest sequence that these hold.

    Args:
        budget: bytes the engine may use of each device; None on a CPU.
        weights, weights_on_host, steps: bytes; see `MemoryPlan`.

    Raises:
        ConfigError: nothing is left, or less than a sequence needs.
    """
    transit = shapes.transit_room * shapes.cache.bytes_per_page
    state = num_bytes(jax.eval_shape(lambda: (shapes.slot_state(), shapes.sampler_state())))
    from_share = False
    if budget is None or config.kv_cache_memory_bytes is not None:
        kv_bytes = config.kv_cache_memory_bytes or _CPU_KV_MEMORY
    else:
        kv_bytes, from_share = page_memory(budget, weights, state, steps + transit), True
    length = _fitting_length(config, shapes, kv_bytes, from_share=from_share)
    return MemoryPlan(
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
        num_devices=shapes.placement.num_devices,
    )


def _fitting_length(
    config: EngineConfig, shapes: StepShapes, kv_bytes: int, *, from_share: bool
) -> int:
    """The longest sequence that pages of so many bytes hold, see `fit_model_len`."""
    windows, chunk = shapes.cache.windows, scheduler_config(config, shapes).longest_chunk
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
