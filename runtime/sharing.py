"""Several models on one device: what each gets, and whether it fits, before any is loaded.

A share is of all the device's memory, whoever else is there: an engine process lets JAX reserve
that much when it starts and counts within it, so that a model has the same room whether it is
started first or last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor

from paged.runtime.config import EngineConfig
from paged.runtime.device_probe import MEMORY_FRACTIONS, DeviceMemory, probe_device
from paged.runtime.engine import find_model
from paged.runtime.errors import ConfigError
from paged.runtime.memory import available_memory, size_text

# What a share is taken of: the rest is for the driver, which wants some for each process.
_USABLE = EngineConfig.gpu_memory_utilization
# Bytes that steps want at least, beside weights and pages.
_STEPS = 2**30
_MIB = 2**20
# What advice leaves beside weights, and the KV pages that it gives on a CPU.
_ROOMY = 1.25
_PAGES_ON_CPU, _FEWEST_PAGES = 2**30, 16 * _MIB
# Shares are decimal numbers, whose sums are not exact.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Claim:
    """What a model of several asks for and needs.

    Attributes:
        share: of the device's memory, for all that it needs; None if that was not stated.
        pages: bytes of KV pages; None if that was not stated.
        weights: bytes.
        has_pages: False for a model of embeddings or scores.
    """

    name: str
    share: float | None
    pages: int | None
    weights: int
    has_pages: bool

    @property
    def wanted(self) -> int:
        """Bytes of weights and of pages that were stated."""
        return self.weights + (self.pages or 0) * self.has_pages


def divide(
    configs: Mapping[str, EngineConfig], shares: Mapping[str, float | None]
) -> dict[str, float]:
    """The share of the device's memory that each model gets; on a CPU it is not looked at.

    Args:
        configs: by the models' names.
        shares: those that were stated.

    Raises:
        ConfigError: a model does not state its memory, or all together do not fit: with the
            numbers, and with others that would do.
        ModelNotFoundError, CheckpointError: there is no such model, or it is damaged.
    """
    for name in MEMORY_FRACTIONS:
        if name in os.environ:
            raise ConfigError(f"{name} is set, which would be the share of each model: unset it")
    device = probe_device()
    claims = [_claim(name, config, shares[name], device) for name, config in configs.items()]
    if device.platform == "cpu":
        check_on_cpu(claims, available_memory())
        return dict.fromkeys(configs, _USABLE)
    if device.total is None:
        raise ConfigError(f"{device.kind} does not report its memory: serve one model on it")
    return shares_on_gpu(claims, device.total, device.kind)


def _claim(name: str, config: EngineConfig, share: float | None, device: DeviceMemory) -> Claim:
    """Reads what describes a model, and fetches no weights."""
    # Here, so that this module and its tests need no JAX.
    from paged.models.config import resolve_dtype
    from paged.models.spread import bytes_of_each, check_devices
    from paged.runtime.pooling.setup import pooling_specs, runs_pooling

    source = find_model(replace(config, load_format="dummy"))
    pools = runs_pooling(config, source)
    specs = pooling_specs(source) if pools else source.specs
    check_devices(specs, source.config, config.tensor_parallel_size)
    dtype = resolve_dtype(config.dtype, source.config, device.platform)
    on_host = 0 if device.platform == "cpu" else int(config.cpu_offload_gb * 2**30)
    weights = bytes_of_each(specs, source.config, dtype, config.tensor_parallel_size)
    weights = max(weights - on_host, 0)
    return Claim(name, share, config.kv_cache_memory_bytes, weights, has_pages=not pools)


def shares_on_gpu(claims: Sequence[Claim], total: int, kind: str) -> dict[str, float]:
    """The share of each: as stated, or what weights and pages want and an equal part of the rest.

    Args:
        total: bytes of the device.
        kind: what it is called.
    """
    shares = {claim.name: claim.share for claim in claims if claim.share is not None}
    by_bytes = {claim.name: claim.wanted for claim in claims if claim.share is None}
    rest = int((_USABLE - sum(shares.values())) * total) - sum(by_bytes.values())
    problems = [*_unstated_on_gpu(claims), *_too_small(claims, total)]
    if sum(shares.values()) > 1 + _ROUNDING:
        problems.append(f"the shares add up to {sum(shares.values()):.4g}, and may to 1")
    elif by_bytes and rest < len(by_bytes) * _STEPS:
        problems.append(
            f"{', '.join(by_bytes)}: weights, pages and {size_text(_STEPS)} for steps each want "
            f"{size_text(sum(by_bytes.values()) + len(by_bytes) * _STEPS)} together, and of the "
            f"{_USABLE:.0%} that are shared out {size_text(max(rest + sum(by_bytes.values()), 0))} "
            "is left"
        )
    if problems:
        where = f"the {size_text(total)} of this {kind}"
        raise ConfigError(_refusal(claims, where, problems, _advice_on_gpu(claims, total), total))
    return shares | {name: (size + rest / len(by_bytes)) / total for name, size in by_bytes.items()}


def check_on_cpu(claims: Sequence[Claim], available: int | None) -> None:
    """Refuse a model that does not say its pages, and what the machine has no memory for.

    Args:
        available: bytes, see `available_memory`; None checks no sum.
    """
    problems = [
        f"{claim.name}: states no kv-cache-memory-bytes, which counts on a CPU"
        for claim in claims
        if claim.has_pages and claim.pages is None
    ]
    wanted = sum(claim.wanted for claim in claims)
    if available is not None and wanted > available:
        problems.append(f"weights and pages want {size_text(wanted)} together")
    if problems:
        where = "this machine's memory"
        if available is not None:
            where = f"the {size_text(available)} of memory that this machine has left"
        raise ConfigError(_refusal(claims, where, problems, _advice_on_cpu(claims, available)))


def _unstated_on_gpu(claims: Sequence[Claim]) -> Iterator[str]:
    for claim in claims:
        if claim.share is None and not claim.has_pages:
            yield f"{claim.name}: states no gpu-memory-utilization, and keeps no KV pages"
        elif claim.share is None and claim.pages is None:
            yield f"{claim.name}: states neither gpu-memory-utilization nor kv-cache-memory-bytes"


def _too_small(claims: Sequence[Claim], total: int) -> Iterator[str]:
    for claim in claims:
        if claim.share is not None and claim.wanted > claim.share * total:
            yield (
                f"{claim.name}: its share is {size_text(int(claim.share * total))}, and it is to "
                f"hold {size_text(claim.wanted)}"
            )


def _refusal(
    claims: Sequence[Claim],
    where: str,
    problems: Sequence[str],
    advice: str,
    total: int | None = None,
) -> str:
    """The numbers, what is wrong with them, and others that would do.

    Args:
        where: the memory that the models are to share.
        total: bytes of a GPU, of which shares are taken.
    """
    rows = [("model", "weights", "gpu-memory-utilization", "kv-cache-memory-bytes")]
    rows += [
        (
            claim.name,
            size_text(claim.weights),
            _share_text(claim.share, total),
            "not given" if claim.pages is None else size_text(claim.pages),
        )
        for claim in claims
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n  ".join([f"The models cannot share {where}:", *table, *problems, advice])


def _share_text(share: float | None, total: int | None) -> str:
    if share is None:
        return "not given"
    return f"{share:g}" + (f" ({size_text(int(share * total))})" if total is not None else "")


def _advice_on_gpu(claims: Sequence[Claim], total: int) -> str:
    """Shares that would do: those stated, if they leave enough to the others."""
    least = {claim.name: (_ROOMY * claim.weights + _STEPS) / total for claim in claims}
    kept = {
        claim.name: claim.share
        for claim in claims
        if claim.share is not None and claim.share >= least[claim.name]
    }
    others = [name for name in least if name not in kept]
    if not others or sum(kept.values()) + sum(least[name] for name in others) > _USABLE:
        kept, others = {}, list(least)
    rest = _USABLE - sum(kept.values()) - sum(least[name] for name in others)
    if rest < 0:
        return "Their weights leave no room for pages and steps: serve fewer models here"
    shares = kept | {name: floor(100 * (least[name] + rest / len(others))) / 100 for name in others}
    return _example("gpu-memory-utilization", {name: f"{shares[name]:g}" for name in least})


def _advice_on_cpu(claims: Sequence[Claim], available: int | None) -> str:
    """Bytes of pages that would do: those stated, or else equal ones."""
    paged = [claim for claim in claims if claim.has_pages]
    most = len(paged) * _PAGES_ON_CPU
    room = most
    if available is not None:
        room = int(_USABLE * available) - sum(claim.weights for claim in claims)
    if room < len(paged) * _FEWEST_PAGES:
        return "Their weights leave no room for pages: serve fewer models here, or smaller ones"
    sizes = {claim.name: claim.pages or _PAGES_ON_CPU for claim in paged}
    if sum(sizes.values()) > room:
        sizes = dict.fromkeys(sizes, min(room, most) // len(paged))
    mib = {name: f"{size // _MIB}M" for name, size in sizes.items()}
    return _example("kv-cache-memory-bytes", mib)


def _example(flag: str, values: Mapping[str, str]) -> str:
    texts = [f"{value} for {name}" for name, value in values.items()]
    return f"This would do: {flag} {', '.join(texts)}"
