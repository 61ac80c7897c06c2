"""An engine in this process, started and watched for a benchmark."""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import jax
from tqdm import tqdm

from paged.models.loading import ModelSource
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.bench.options import OutputOptions
from paged.runtime.bench.results import BenchResult, EngineReport, RunResult, now
from paged.runtime.config import EngineConfig, flags
from paged.runtime.engine import find_model
from paged.runtime.errors import ConfigError
from paged.runtime.front import Prompt
from paged.runtime.llm import LLM
from paged.runtime.messages import EngineStats
from paged.runtime.outputs import RequestOutput
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams

_SECONDS_BETWEEN_LOOKS = 0.1

Generate = Callable[[Sequence[Prompt], Sequence[SamplingParams], bool], list[RequestOutput]]


@dataclass(frozen=True)
class StartedEngine:
    """An engine that is ready, behind one blocking call.

    Attributes:
        generate: takes prompts, a set of parameters each, and whether to show progress.
        stats: a snapshot; may be called while `generate` runs in another thread.
        start_seconds: from weights on disk to ready, compiling included, imports not.
    """

    generate: Generate
    stats: Callable[[], EngineStats]
    start_seconds: float


class EngineMeter:
    """Watches an engine: what `report` says covers what the `with` statement runs.

    An engine that can no longer be watched ends the `with` statement with the exception that said
    so, unless what runs there has raised one itself, which tells more.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        self._looks: list[float] = []
        self._trouble: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._before = self._stats()
        self._thread.start()
        return self

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._thread.join()
        if raised is not None:
            return
        if self._trouble is not None:
            raise self._trouble
        self._after = self._stats()

    @property
    def report(self) -> EngineReport:
        before, after, looks = self._before, self._after, self._looks
        queries = after.prefix_cache_queries - before.prefix_cache_queries
        hits = after.prefix_cache_hits - before.prefix_cache_hits
        return EngineReport(
            num_steps=after.num_steps - before.num_steps,
            prefix_hit_rate=hits / queries if queries else 0.0,
            num_preemptions=after.num_preemptions - before.num_preemptions,
            kv_waste=sum(looks) / len(looks) if looks else None,
            compiles_after_warmup=after.compiles_after_warmup,
        )

    def _look(self) -> None:
        try:
            while not self._stop.wait(_SECONDS_BETWEEN_LOOKS):
                stats = self._stats()
                if stats.num_running:
                    self._looks.append(stats.kv_waste)
        except Exception as error:  # a thread would print it in the midst of what is told
            self._trouble = error


def config_of(args: argparse.Namespace) -> EngineConfig:
    """The engine flags among parsed arguments.

    Raises:
        ConfigError: they do not go together, or the seed is none that prompts are drawn with.
    """
    values = {flag.name: getattr(args, flag.name) for flag in flags()}
    seed = values["seed"] or 0
    if seed < 0:
        raise ConfigError(f"--seed is of prompts here, too, and must be at least 0, got {seed}")
    return EngineConfig(**values | {"seed": seed})


def result_here(
    command: str, model: str, options: OutputOptions, runs: Sequence[RunResult] = ()
) -> BenchResult:
    """What a command has found just now on the device of this process."""
    return BenchResult(
        command=command,
        date=now(),
        model=model,
        device=str(jax.devices()[0].device_kind),
        label=options.label or "",
        runs=tuple(runs),
    )


def without_weights(config: EngineConfig) -> ModelSource:
    """The model's configuration and tokenizer; no files of weights are looked for."""
    return find_model(replace(config, load_format="dummy"))


def sampling(num_tokens: int, *, n: int, ignore_eos: bool, detokenize: bool) -> SamplingParams:
    """Greedy; several sequences of a prompt must be sampled to differ."""
    return SamplingParams(
        n=n,
        temperature=0.0 if n == 1 else 1.0,
        max_tokens=num_tokens,
        ignore_eos=ignore_eos,
        detokenize=detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@contextmanager
def started_llm(config: EngineConfig) -> Iterator[StartedEngine]:
    """An `LLM`, closed at the end."""
    begin = time.perf_counter()
    with LLM(**vars(config)) as llm:
        seconds = time.perf_counter() - begin

        def generate(
            prompts: Sequence[Prompt], params: Sequence[SamplingParams], progress: bool
        ) -> list[RequestOutput]:
            return llm.generate(prompts, params, use_tqdm=progress)

        yield StartedEngine(generate, llm.get_metrics, seconds)


@contextmanager
def started_async_engine(config: EngineConfig) -> Iterator[StartedEngine]:
    """An `AsyncEngine`, shut down at the end."""
    begin = time.perf_counter()
    engine = AsyncEngine.from_config(config)
    seconds = time.perf_counter() - begin

    def generate(
        prompts: Sequence[Prompt], params: Sequence[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        with tqdm(total=len(prompts), desc="Requests", disable=not progress) as bar:
            return asyncio.run(_generate_all(engine, prompts, params, bar.update))

    try:
        yield StartedEngine(generate, engine.stats, seconds)
    finally:
        engine.shutdown()


async def _generate_all(
    engine: AsyncEngine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    on_done: Callable[[], object],
) -> list[RequestOutput]:
    """The last output of each. Raises EngineDead."""

    async def last_output(prompt: Prompt, wanted: SamplingParams) -> RequestOutput:
        *_, last = [output async for output in engine.generate(prompt, wanted)]
        on_done()
        return last

    both = zip(prompts, params, strict=True)
    outputs = await asyncio.gather(*(last_output(prompt, wanted) for prompt, wanted in both))
    if any(each.finish_reason == "error" for output in outputs for each in output.outputs):
        await engine.look()  # raises what the engine died of
    return outputs
