"""From flags to a ready engine for vectors and scores: what is worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from paged.models.config import ModelConfig, resolve_dtype
from paged.models.embedder import Embedder
from paged.models.encoder import is_classifier
from paged.models.loading import ModelSource
from paged.models.loading.bodies import load_embedder
from paged.models.loading.modules import LISTING, EmbeddingSettings, read_settings
from paged.models.pooling import Pooling
from paged.models.registry import ENCODERS, is_headless
from paged.models.weights import for_device, param_bytes, param_shapes
from paged.runtime.backend import choose_backend
from paged.runtime.compiler import memory_to_run
from paged.runtime.compiles import use_compile_cache
from paged.runtime.config import EngineConfig
from paged.runtime.division import step_limits
from paged.runtime.errors import ConfigError
from paged.runtime.memory import size_text
from paged.runtime.pooling.abilities import Abilities
from paged.runtime.pooling.grid import Grid
from paged.runtime.pooling.runner import PoolingRunner, compile_programs
from paged.runtime.pooling.worker import Runner
from paged.runtime.setup import (
    claim_devices,
    free_memory,
    tell_quantization,
    timed,
    within_memory,
)


@dataclass(frozen=True)
class Ready[R: Runner]:
    """A model that is loaded and compiled.

    Attributes:
        max_model_len: most tokens of a text.
        lowercase: texts are put in lower case first.
    """

    runner: R
    grid: Grid
    abilities: Abilities
    max_model_len: int
    lowercase: bool


def makes_no_text(source: ModelSource) -> bool:
    """Whether a model is an encoder, or stored without the head that makes text."""
    architecture = source.config.architecture
    return architecture in ENCODERS or is_headless(architecture)


def runs_pooling(config: EngineConfig, source: ModelSource) -> bool:
    """Whether a model is to give vectors or scores, and not text.

    Left to itself a model does if it is an encoder, or is stored without the head that makes text,
    or comes with a list of modules.

    Raises:
        ConfigError: it cannot give the text that is asked of it.
    """
    headless = makes_no_text(source)
    if config.runner == "generate" and headless:
        raise ConfigError(
            f"{source.name} ({source.config.architecture}) gives embeddings or scores and cannot "
            "generate text: leave out --runner generate"
        )
    if config.runner != "auto":
        return config.runner == "pooling"
    return headless or (source.folder is not None and (source.folder / LISTING).exists())


def settings_of(source: ModelSource) -> EmbeddingSettings:
    """What a model's folder says of its vectors."""
    return EmbeddingSettings() if source.folder is None else read_settings(source.folder)


def pooling_specs(source: ModelSource) -> Any:
    """Description of the parameters of a model for vectors or scores."""
    return make_embedder(source.config, settings_of(source), backend="xla").specs()


def prepare_pooling(
    config: EngineConfig, source: ModelSource, *, progress: bool = True
) -> Ready[PoolingRunner]:
    """Settle every shape, compile every program and load the weights.

    Raises:
        ConfigError: the flags do not go together or do not fit the device. Nothing is loaded then,
            unless something else takes the device's memory meanwhile.
    """
    if config.cpu_offload_gb:
        raise ConfigError(
            f"--cpu-offload-gb is for models that generate text, and {source.name} gives "
            "embeddings or scores: leave it out."
        )
    if config.prefill_servers or config.kv_transfer_port is not None:
        flag = "--prefill-servers" if config.prefill_servers else "--kv-transfer-port"
        raise ConfigError(
            f"{flag} is for models that generate text, and {source.name} gives embeddings or "
            "scores: leave it out."
        )
    use_compile_cache(config.compile_cache_dir)
    if config.tensor_parallel_size > 1:  # as it is where there are several hosts
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} is for models that generate "
            "text: one that gives vectors or scores runs on one device. Drop it."
        )
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {config.pipeline_parallel_size} is for models that generate "
            "text: one that gives vectors or scores runs on one device. Drop it."
        )
    [device] = claim_devices(config)
    settings = settings_of(source)
    length = model_length(config.max_model_len, source.config, settings)
    embedder = make_embedder(
        source.config.for_length(length),
        settings,
        backend=choose_backend(config.attention_backend, device),
    )
    check_dimensions(settings.dimensions, embedder.size)
    budget = None if device.platform == "cpu" else free_memory(device)
    limits = step_limits(config, budget)
    grid = Grid.make(length, limits.max_num_seqs, limits.max_num_batched_tokens)
    with within_memory(config):
        runner = _load(config, source, embedder, grid, budget, progress=progress)
    abilities = Abilities(
        scores=embedder.scores,
        size=embedder.size,
        dimensions=settings.dimensions,
        normalized=embedder.pooling.normalize,
    )
    return Ready(runner, grid, abilities, length, settings.lowercase)


def _load(
    config: EngineConfig,
    source: ModelSource,
    embedder: Embedder,
    grid: Grid,
    budget: int | None,
    *,
    progress: bool,
) -> PoolingRunner:
    """Compile every program, see that all fits `budget` (bytes), and load the weights."""
    device, specs = jax.devices()[0], embedder.specs()
    dtype = resolve_dtype(config.dtype, source.config, device.platform)
    shapes = for_device(param_shapes(specs, dtype), device)
    programs = compile_programs(embedder, grid, shapes, show_progress=progress)
    if budget is not None:
        check_memory(budget, param_bytes(specs, dtype), memory_to_run(programs.values()))
    tell_quantization(source.config, specs, dtype)
    with timed(f"Loaded {source.name}"):
        params = for_device(
            load_embedder(embedder, source, dtype, seed=config.seed, progress=progress), device
        )
        jax.block_until_ready(params)
    return PoolingRunner(programs, params)


def model_length(wanted: int | None, model: ModelConfig, settings: EmbeddingSettings) -> int:
    """Most tokens of a text: --max-model-len, or what the model was made for.

    Raises:
        ConfigError: more is wanted than the model was made for.
    """
    longest = model.context_length
    if wanted is None or wanted == -1:
        return min(longest, settings.max_length or longest)
    if wanted > longest:
        raise ConfigError(
            f"--max-model-len {wanted} is greater than the model's own length of {longest}. "
            f"Use at most {longest}."
        )
    return wanted


def make_embedder(model: ModelConfig, settings: EmbeddingSettings, *, backend: str) -> Embedder:
    """What is computed.

    A folder without a list of modules leaves it to custom: the first token of an encoder, the last
    of a decoder, and vectors of length 1.

    Raises:
        ConfigError: layers that do not go together, or a classifier that gives not one score.
    """
    pooling = settings.pooling or Pooling("cls" if model.architecture in ENCODERS else "last")
    size = model.hidden_size
    for module in pooling.dense:
        if module.inputs != size:
            raise ConfigError(
                f"the layer in {module.folder!r} takes {module.inputs} numbers, and vectors have "
                f"{size}"
            )
        size = module.outputs
    if is_classifier(model) and model.extras.num_labels != 1:
        raise ConfigError(
            f"this {model.architecture} has {model.extras.num_labels} labels; only those with one, "
            "which is a score, are supported"
        )
    return Embedder(model, pooling, settings.activation or "Sigmoid", backend)


def check_dimensions(allowed: tuple[int, ...] | None, size: int) -> None:
    """Raise ConfigError if vectors of `size` numbers cannot be cut to what a model allows."""
    if allowed and max(allowed) > size:
        raise ConfigError(
            f"'matryoshka_dimensions' has {max(allowed)}, and this model's vectors have {size} "
            "numbers"
        )


def check_memory(budget: int, weights: int, steps: int) -> None:
    """Raise ConfigError if weights and steps do not fit a budget, all in bytes."""
    if weights + steps > budget:
        raise ConfigError(
            f"The weights ({size_text(weights)}) and the largest step ({size_text(steps)}) do not "
            f"fit the {size_text(budget)} that may be used. Lower "
            "--max-num-batched-tokens or --max-model-len, or raise --gpu-memory-utilization."
        )
