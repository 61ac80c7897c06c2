"""Engines that are tried, one at a time, each in a process of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.bench.engine_load import run_workload
from paged.runtime.bench.offline import without_weights
from paged.runtime.bench.results import RequestTimes, Value
from paged.runtime.bench.workloads import BenchRequest
from paged.runtime.config import EngineConfig
from paged.runtime.device_probe import probe_device
from paged.runtime.division import step_limits
from paged.runtime.errors import ConfigError, EngineDead
from paged.runtime.memory import MemoryPlan, available_memory
from paged.runtime.tune.journal import Journal, Start
from paged.runtime.tune.levers import Facts, Values
from paged.runtime.tune.search import Trial, changed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Load:
    """What every engine is given to do.

    Attributes:
        times: seconds after the start at which each request is sent.
        goals: milliseconds by time.
    """

    requests: Sequence[BenchRequest]
    times: Sequence[float]
    goals: dict[str, float] = field(default_factory=dict)
    max_concurrency: int | None = None
    progress: bool = False


class Workbench:
    """Runs the load under settings, and keeps an engine while its settings are asked for.

    Args:
        config: the baseline.
        journal: knows what ran before, and is told what runs.
    """

    def __init__(self, config: EngineConfig, load: Load, journal: Journal) -> None:
        self._config, self._load, self._journal = config, load, journal
        self._engine: AsyncEngine | None = None
        self._values: dict[str, Value] | None = None

    def start(self) -> Start:
        """What the baseline is, from the journal or from an engine.

        Raises:
            ConfigError, EngineDead: it does not start, or has no device. There is nothing to tune.
        """
        if self._journal.start is not None:
            return self._journal.start
        kind = probe_device().kind  # now, while no engine has it
        self._engine = AsyncEngine.from_config(self._config, separate_process=True)
        assert self._engine.about is not None
        memory = self._engine.about.memory
        self._values = resolved(self._config, memory)
        start = Start(self._values, self._facts(memory), _device(memory, kind))
        self._journal.begin(start)
        return start

    def measure(self, trial: Trial) -> Trial:
        """The trial with a run more; a `Measure` of `paged.runtime.tune.search`."""
        if (known := self._journal.recalled(trial)) is not None:
            return known
        assert self._journal.start is not None
        try:
            engine = self._engine_of(trial.values, self._journal.start.values)
            run = run_workload(
                engine,
                self._load.requests,
                name=trial.lever or "baseline",
                times=self._load.times,
                max_concurrency=self._load.max_concurrency,
                goals=self._load.goals,
                settings=changed(trial.values, self._journal.start.values),
                empty_cache=True,
                progress=self._load.progress,
            )
        except ConfigError as error:
            self.close()
            return self._journal.add(trial, None, str(error))
        except EngineDead as error:  # which the settings need not have been the cause of
            self.close()
            return self._journal.add(trial, None, str(error), is_final=False)
        if run.num_failed:
            failed = f"{run.num_failed} of {len(self._load.requests)} requests failed"
            return self._journal.add(trial, None, f"{failed}: {_first_error(run.requests)}")
        return self._journal.add(trial, run, None)

    def close(self) -> None:
        """End the engine that runs, if one does."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = self._values = None

    def _engine_of(self, values: Values, baseline: Values) -> AsyncEngine:
        if self._engine is None or self._values != values:
            self.close()
            flags: dict[str, Any] = dict(changed(values, baseline))
            config = replace(self._config, **flags)
            self._engine = AsyncEngine.from_config(config, separate_process=True)
            self._values = dict(values)
        return self._engine

    def _facts(self, memory: MemoryPlan) -> Facts:
        requests = self._load.requests
        return Facts(
            num_requests=len(requests),
            longest=max(each.num_input_tokens + each.num_output_tokens for each in requests),
            on_gpu=memory.budget is not None,
            free_bytes=available_memory(),
            is_quantized=without_weights(self._config).config.quantization is not None,
        )


def resolved(config: EngineConfig, memory: MemoryPlan) -> dict[str, Value]:
    """What the flags that are tuned came to in an engine that was told this."""
    limits = step_limits(config, memory.budget)
    pages = None if memory.budget is not None else memory.num_pages * memory.bytes_per_page
    return {
        "max_model_len": memory.max_model_len,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes or pages,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": config.quantization,
    }


def _device(memory: MemoryPlan, kind: str) -> str:
    return "CPU" if memory.budget is None else f"{memory.num_devices} x {kind}"


def _first_error(requests: Sequence[RequestTimes]) -> str:
    return next((each.error for each in requests if each.error), "no cause is known")
