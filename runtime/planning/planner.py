"""A plan: what an engine would be on a GPU that is not there, of a model whose weights are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from paged.groups import most_pages
from paged.models.config import ModelConfig, resolve_dtype
from paged.models.loading import ModelNotFoundError, ModelSource
from paged.models.mesh import TENSOR
from paged.models.spread import bytes_of_each, check_devices
from paged.models.weights import param_bytes
from paged.runtime.config import EngineConfig
from paged.runtime.division import memory_plan, shapes_before_pages, with_host_pages
from paged.runtime.engine import engine_config, find_model
from paged.runtime.errors import ConfigError
from paged.runtime.memory import MemoryPlan
from paged.runtime.placement import Placement
from paged.runtime.planning.gpus import Gpu, find_gpu
from paged.runtime.planning.speed import Speed, StepTime
from paged.runtime.planning.temporaries import step_memory_estimate
from paged.runtime.planning.work import specs_of, work_of
from paged.runtime.pooling.setup import runs_pooling
from paged.runtime.steps import StepShapes
from paged.runtime.weight_offload import layers_on_host

NOT_FETCHED = "nothing is fetched here"
"""Said of a model that is not in the hub's cache."""
# Batches whose steps a plan tells, as far as they fit.
_BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
# Tokens or requests: steps of a prompt are added up one by one.
_MOST = 2**24


@dataclass(frozen=True)
class Workload:
    """Requests that a plan is for.

    Attributes:
        input_len, output_len: tokens of a typical one.
        concurrency: how many run at once; None for as many as fit.
    """

    input_len: int = 1024
    output_len: int = 128
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "concurrency"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be at least 1 and at most {_MOST:,}, got "
                    f"{value:,}"
                )

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.input_len + self.output_len


@dataclass(frozen=True)
class Plan:
    """Where the memory of a GPU goes, and how fast it is.

    Attributes:
        source: the model.
        gpu: each of `memory.num_devices`.
        config: what the engine would be told.
        workload: the requests.
        memory: of each device, as the engine divides it.
        shapes: what steps would be compiled for.
        dtype: of weights and activations.
        speed: of its steps.
    """

    source: ModelSource
    gpu: Gpu
    config: EngineConfig
    workload: Workload
    memory: MemoryPlan
    shapes: StepShapes
    dtype: jnp.dtype
    speed: Speed

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens of the longest sequences that the pages hold."""
        return self.memory.num_tokens

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of a token of the longest sequences in the pages of each device."""
        memory = self.memory
        return memory.bytes_per_page * (memory.num_pages - 1) / max(memory.num_tokens, 1)

    @property
    def max_full_length_sequences(self) -> int:
        """Sequences of max_model_len tokens that fit at once."""
        return int(self.memory.num_full_sequences)

    @property
    def max_typical_sequences(self) -> int:
        """Sequences of the workload that the pages hold at their ends."""
        length = min(self.workload.length, self.memory.max_model_len)
        windows, page_size = self.shapes.cache.windows, self.memory.page_size
        return (self.memory.num_pages - 1) // most_pages(windows, length, 1, page_size)

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in a step."""
        return self.shapes.buckets.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens in a step."""
        return self.shapes.buckets.mixed[-1]

    @property
    def concurrency(self) -> int:
        """Sequences that run at once: those of the workload, as far as pages and slots go."""
        most = max(min(self.max_typical_sequences, self.max_num_seqs), 1)
        return min(self.workload.concurrency or most, most)

    def decode_step(self, batch: int, context: float | None = None) -> StepTime:
        """A step that decodes so many sequences.

        Args:
            context: tokens that each sees; None for the mean of the workload's.
        """
        if context is None:
            context = self.workload.input_len + self.workload.output_len / 2
        return self.speed.decode(batch, context)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches that are worth telling: up to the concurrency, and that itself."""
        return (*(size for size in _BATCHES if size < self.concurrency), self.concurrency)

    @property
    def decode_step_ms(self) -> float:
        """Milliseconds of a decode step at the concurrency."""
        return 1e3 * self.decode_step(self.concurrency).expected

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token of a request that finds the engine idle."""
        return 1e3 * self.speed.prompt(self.workload.input_len, self.max_num_batched_tokens)

    @property
    def burst_ttft_ms(self) -> float:
        """Milliseconds to the first token of the last of as many requests as run at once."""
        return 1e3 * self.concurrency * self._prompt_seconds

    @cached_property
    def _prompt_seconds(self) -> float:
        return self.speed.prompts(self.workload.input_len, self.max_num_batched_tokens)

    @property
    def seconds_per_request(self) -> float:
        """Of a request while the concurrency is kept up, and others' prompts take their turns."""
        decoded = (self.workload.output_len - 1) * self.decode_step_ms / 1e3
        return self.concurrency * self._prompt_seconds + decoded

    @property
    def requests_per_second(self) -> float:
        """Requests that end in a second while the concurrency is kept up."""
        return self.concurrency / self.seconds_per_request

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens generated in a second, of all requests."""
        return self.requests_per_second * self.workload.output_len

    def with_flags(self, **changes: Any) -> Plan:
        """The same plan with other flags. Raises ConfigError where it does not fit."""
        return plan_for(replace(self.config, **changes), self.gpu, self.workload)


def plan(
    model: str | None,
    gpu: str | Gpu,
    *,
    input_len: int = Workload.input_len,
    output_len: int = Workload.output_len,
    concurrency: int | None = None,
    **flags: Any,
) -> Plan:
    """What an engine would be, without its GPU and without its weights.

    Args:
        model: a folder with a config.json, such a file, a GGUF file, or a hub id that is cached;
            None for the embedded model.
        gpu: one of `GPUS`, by name, or your own.
        input_len, output_len, concurrency: see `Workload`.
        flags: of `EngineConfig`, as for `LLM`.

    Raises:
        ConfigError: the flags do not go together, or the model does not fit.
        ModelNotFoundError: there is no such model here.
    """
    found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return plan_for(
        engine_config(model, flags), found, Workload(input_len, output_len, concurrency)
    )


def plan_for(config: EngineConfig, gpu: Gpu, workload: Workload) -> Plan:
    """See `plan`."""
    source = local_model(config)
    if runs_pooling(config, source):
        raise ConfigError(
            f"{source.name} gives embeddings or scores and keeps no KV pages: a plan has nothing "
            "to say of it"
        )
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {config.pipeline_parallel_size}: a plan is for a model in "
            "one piece; leave it out"
        )
    model, device, number = source.config, gpu.device, config.tensor_parallel_size
    dtype = resolve_dtype(config.dtype, model, device.platform)
    check_devices(specs_of(model), model, number)
    placement = _placement(model, number)
    budget = int(config.gpu_memory_utilization * gpu.usable)
    shapes = shapes_before_pages(config, model, placement, device, dtype, budget)
    shapes = with_host_pages(config, shapes, budget, available=None)
    on_host = _bytes_on_host(config, source, dtype)
    weights = bytes_of_each(specs_of(model), model, dtype, number) - on_host
    steps = step_memory_estimate(shapes, dtype, is_hopper=gpu.is_hopper)
    memory = memory_plan(
        config, shapes, budget, weights=weights, weights_on_host=on_host, steps=steps
    )
    work = work_of(model, shapes, dtype, device)
    speed = Speed(work, gpu, shapes.cache.dtype.itemsize, on_host)
    return Plan(source, gpu, config, workload, memory, shapes, dtype, speed)


def local_model(config: EngineConfig) -> ModelSource:
    """The model, without its weights; of the hub if it is cached.

    Raises:
        ConfigError, CheckpointError: it is not supported, or damaged.
        ModelNotFoundError: it is not here.
    """
    with without_the_hub():
        return find_model(replace(config, load_format="dummy"))


def _placement(model: ModelConfig, number: int) -> Placement:
    """Devices that are not there."""
    if number == 1:
        return Placement()
    mesh: Any = AbstractMesh((number,), (TENSOR,))  # is asked for shapes alone, as a real one
    return Placement(mesh, latents=model.latent_rank is not None)


def _bytes_on_host(config: EngineConfig, source: ModelSource, dtype: jnp.dtype) -> int:
    """Weights that --cpu-offload-gb puts into host memory."""
    layers = specs_of(source.config).layers
    chosen = layers_on_host(config.cpu_offload_gb, layers, dtype, available=None)
    return sum(param_bytes(layers[index], dtype) for index in chosen)


@contextmanager
def without_the_hub() -> Iterator[None]:
    """What is looked up meanwhile is looked up in the hub's cache alone: nothing is fetched."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    except ModelNotFoundError as error:
        message = str(error).replace("HF_HUB_OFFLINE is set", NOT_FETCHED)
        raise ModelNotFoundError(message) from error
    finally:
        constants.HF_HUB_OFFLINE = before
