"""What a started engine says of itself once: where its memory went, and how long its start took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from paged.runtime.config import EngineConfig
from paged.runtime.memory import MemoryPlan

_GIB = 2**30


@dataclass(frozen=True)
class About:
    """An engine that makes text.

    Attributes:
        memory: bytes by purpose.
        startup: seconds by phase.
        settings: of the KV cache, by vLLM's names.
    """

    memory: MemoryPlan
    startup: Mapping[str, float]
    settings: Mapping[str, str]


class StartClock:
    """Times the phases of a start.

    Attributes:
        seconds: by phase, those that have ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is this phase, or more of it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def cache_settings(config: EngineConfig, memory: MemoryPlan) -> dict[str, str]:
    """The settings of the KV cache as labels of vLLM's `cache_config_info`."""
    values = {
        "block_size": memory.page_size,
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "kv_offloading_size": config.kv_offloading_size,
        "num_cpu_blocks": memory.num_host_pages,
        "num_gpu_blocks": memory.num_pages - 1,
        "prefix_caching_hash_algo": "blake2b",
        "swap_space": memory.num_host_pages * memory.bytes_per_host_page / _GIB,
    }
    return {name: str(value) for name, value in values.items()}
