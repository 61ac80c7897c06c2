"""What each flag would change: the same plan with one thing different, time after time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.planning.gpus import Gpu
from paged.runtime.planning.planner import Plan, Workload, plan_for

_FP8_CAPABILITY = 8.9
_ROOMY_SHARE = 0.95
_FEW_SEQUENCES, _FEW_TOKENS = 256, 2048
_DEVICES = (2, 4, 8)


@dataclass(frozen=True)
class Lever:
    """One thing that could be different.

    Attributes:
        flag: as it would be written.
        plan: with it; None where that cannot be.
        refusal: why not.
    """

    flag: str
    plan: Plan | None
    refusal: str = ""


def levers(config: EngineConfig, gpu: Gpu, workload: Workload) -> list[Lever]:
    """What could be changed, one thing at a time, of an engine that fits."""
    return [
        _lever(config, gpu, workload, {flag: value})
        for flag, value in _choices(config, gpu, workload)
    ]


def remedies(config: EngineConfig, gpu: Gpu, workload: Workload) -> list[Lever]:
    """Changes with which a model fits that does not as it is: as few as do."""
    fewer_bits = ["int4"] if gpu.flops8 is None else ["fp8", "int4"]
    single: list[dict[str, Any]] = [
        {"max_model_len": -1},
        *({"quantization": method} for method in fewer_bits if config.quantization is None),
        *({"tensor_parallel_size": number} for number in _DEVICES),
    ]
    made = [_lever(config, gpu, workload, change) for change in single]
    shorter = [
        _lever(config, gpu, workload, {**change, "max_model_len": -1})
        for change, alone in zip(single, made, strict=True)
        if alone.plan is None
    ]
    return [each for each in (*made, *shorter) if each.plan is not None]


def _lever(config: EngineConfig, gpu: Gpu, workload: Workload, change: dict[str, Any]) -> Lever:
    text = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())
    try:
        return Lever(text, plan_for(EngineConfig(**{**vars(config), **change}), gpu, workload))
    except ConfigError as error:
        return Lever(text, None, str(error))


def _choices(config: EngineConfig, gpu: Gpu, workload: Workload) -> Iterator[tuple[str, Any]]:
    """Flags and values that differ from what is configured."""
    enough = -(-workload.length // 1024) * 1024
    if config.max_model_len != enough:
        yield "max_model_len", enough
    if config.kv_cache_dtype == "auto":
        yield "kv_cache_dtype", "fp8" if float(gpu.capability) >= _FP8_CAPABILITY else "int8"
    if config.quantization is None:
        yield "quantization", "fp8" if gpu.flops8 else "int8"
        yield "quantization", "int4"
    yield "tensor_parallel_size", 2 * config.tensor_parallel_size
    if config.tensor_parallel_size > 1:
        yield "tensor_parallel_size", config.tensor_parallel_size // 2
    if config.gpu_memory_utilization < _ROOMY_SHARE and config.kv_cache_memory_bytes is None:
        yield "gpu_memory_utilization", _ROOMY_SHARE
    if config.max_num_seqs is None or config.max_num_seqs > _FEW_SEQUENCES:
        yield "max_num_seqs", _FEW_SEQUENCES
    if config.max_num_batched_tokens is None or config.max_num_batched_tokens > _FEW_TOKENS:
        yield "max_num_batched_tokens", _FEW_TOKENS
