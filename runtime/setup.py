"""From flags to a ready device: what an engine works out once, before it serves."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from paged.attention import default_backend
from paged.cache import CacheSpec
from paged.models.config import ModelConfig, resolve_dtype
from paged.models.loading import ModelSource
from paged.models.registry import Family, get_family
from paged.runtime.buckets import Buckets
from paged.runtime.compiles import use_compile_cache
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.memory import MemoryPlan, fit_model_len, page_memory
from paged.runtime.programs import step_memory
from paged.runtime.runner import StepRunner
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.steps import StepShapes

logger = logging.getLogger(__name__)

_GIB = 2**30
_CPU_KV_MEMORY = _GIB
# Kernels' workspaces and allocator rounding, which no program reports.
_DEVICE_RESERVE = _GIB // 2


@dataclass(frozen=True)
class StepLimits:
    """Sequences and tokens in a step, as flags or the platform's defaults say."""

    max_num_seqs: int
    max_num_batched_tokens: int


def claim_device_memory(config: EngineConfig) -> None:
    """Let JAX reserve the engine's share of the device. Does nothing once JAX holds it."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(config.gpu_memory_utilization))


def prepare(
    config: EngineConfig, source: ModelSource, *, progress: bool
) -> tuple[StepRunner, SchedulerConfig, MemoryPlan]:
    """Load the weights, divide the memory and compile every program.

    Raises:
        ConfigError: the flags do not go together or do not fit the device; nothing is left behind.
    """
    claim_device_memory(config)
    use_compile_cache(config.compile_cache_dir)
    device = jax.devices()[0]
    model, platform = source.config, device.platform
    family = get_family(model.architecture)
    limits = step_limits(config, device)
    dtype = resolve_dtype(config.dtype, model, platform)
    started = time.perf_counter()
    params = source.load(dtype, seed=config.seed, progress=progress)
    jax.block_until_ready(params)
    logger.info("Loaded %s in %.1f s", source.name, time.perf_counter() - started)

    backend = config.attention_backend
    shapes = _provisional_shapes(
        config,
        family,
        model,
        limits,
        dtype if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype),
        default_backend(platform) if backend == "auto" else backend,
    )
    shapes, memory = _divide_memory(config, shapes, params, device)
    logger.info("%s", memory.report())
    limits = _check_limits(config, limits, memory.max_model_len)
    buckets = Buckets.make(limits.max_num_seqs, limits.max_num_batched_tokens)
    started = time.perf_counter()
    runner = StepRunner(replace(shapes, buckets=buckets), params, progress=progress)
    logger.info(
        "Compiled %d programs in %.1f s", runner.num_programs, time.perf_counter() - started
    )
    scheduling = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=memory.max_model_len,
        policy=config.scheduling_policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
    )
    return runner, scheduling, memory


def step_limits(config: EngineConfig, device: jax.Device) -> StepLimits:
    """Flags, or defaults: 32 and 512 on a CPU; 256 (1024 from 70 GiB up) and 8192 on a GPU."""
    if device.platform == "cpu":
        seqs, tokens = 32, 512
    else:
        seqs, tokens = (1024 if device_memory(device) >= 63 * _GIB else 256), 8192
    seqs = config.max_num_seqs or seqs
    return StepLimits(seqs, config.max_num_batched_tokens or max(tokens, seqs))


def device_memory(device: jax.Device) -> int:
    """Bytes that JAX may use on a device."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(
            f"{device.device_kind} does not report its memory. Give --kv-cache-memory-bytes."
        )
    return int(stats["bytes_limit"])


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


def _provisional_shapes(
    config: EngineConfig,
    family: Family,
    model: ModelConfig,
    limits: StepLimits,
    kv_dtype: jnp.dtype,
    backend: str,
) -> StepShapes:
    """Shapes with the number of pages still open: one sequence's worth."""
    wanted = config.max_model_len
    length = model.context_length if wanted in (None, -1) else wanted
    pages = -(-length // config.block_size) + 1
    cache = CacheSpec(
        num_layers=model.num_layers,
        num_pages=pages,
        page_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype,
    )
    buckets = Buckets.make(limits.max_num_seqs, limits.max_num_batched_tokens)
    return StepShapes(family, model, cache, buckets, length, backend)


def _divide_memory(
    config: EngineConfig, shapes: StepShapes, params: Any, device: jax.Device
) -> tuple[StepShapes, MemoryPlan]:
    """Give what weights, state and steps leave to pages, and settle the longest sequence."""
    cache = shapes.cache
    weights = _num_bytes(params)
    state = _num_bytes(jax.eval_shape(lambda: (shapes.slot_state(), shapes.sampler_state())))
    budget, steps = None, 0
    if config.kv_cache_memory_bytes is not None:
        kv_bytes = config.kv_cache_memory_bytes
    elif device.platform == "cpu":
        kv_bytes = _CPU_KV_MEMORY
    else:
        budget = device_memory(device)
        steps = step_memory(shapes, params) + _DEVICE_RESERVE
        kv_bytes = page_memory(budget, weights, state, steps)
    num_pages = kv_bytes // cache.bytes_per_page
    length = fit_model_len(
        config.max_model_len,
        shapes.model.context_length,
        num_pages=num_pages,
        page_size=cache.page_size,
        kv_bytes=kv_bytes,
        bytes_per_page=cache.bytes_per_page,
    )
    memory = MemoryPlan(
        budget=budget,
        weights=weights,
        state=state,
        steps=steps,
        bytes_per_page=cache.bytes_per_page,
        page_size=cache.page_size,
        num_pages=num_pages,
        max_model_len=length,
    )
    cache = replace(cache, num_pages=num_pages)
    return replace(shapes, cache=cache, max_model_len=length), memory


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
