"""The named workloads on one engine, the time of a decode step by batch size, and throughput by
how many requests of 300 tokens in and 128 out are there at a time (--streams).

    python benchmarks/offline_baselines.py MODEL --workloads B1,B4 --batches 1,32

MODEL is a folder with a config.json (weights are random). Token ids in and out; greedy; the engine
starts once. A decode step is timed by the clock over steps in which every sequence decodes, host
time included: 1,024 prompt tokens each, 96 steps. Prints a line of JSON per figure; on a GPU the
first says what the card reads and multiplies per second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.gpu import ceilings
from paged.models.loading import ModelSource
from paged.runtime.bench.workloads import BenchRequest, IdRange, baseline_requests
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.engine import Core, find_model
from paged.runtime.messages import EngineRequest
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.setup import claim_devices

DECODE_STEPS = 96
SETTLING_STEPS = 8
# Batches reach full size long before their first sequence ends.
MAX_STEPS = 256
# Requests of each stream: those of one stream begin ever less together.
WAVES = 6


def add(core: Core, name: str, request: BenchRequest) -> None:
    """Queue it, greedy, to give exactly its number of output tokens."""
    assert isinstance(request.prompt, list), "the workloads here are token ids"
    params = SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
    core.add(EngineRequest(name, request.prompt, params, arrival_time=time.time()))


def run_workload(core: EngineCore, name: str, vocab_size: int) -> dict[str, Any]:
    """All of a workload's requests at once, from the first to the last token."""
    core.reset_prefix_cache()
    before = core.stats()
    requests = baseline_requests(name, None, seed=None, ids=IdRange.below(vocab_size))
    start = time.perf_counter()
    for i, request in enumerate(requests):
        add(core, f"{name}-{i}", request)
    while core.has_work:
        core.step()
    seconds = time.perf_counter() - start
    after = core.stats()
    num_in = sum(request.num_input_tokens for request in requests)
    num_out = sum(request.num_output_tokens for request in requests)
    return {
        "workload": name,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(num_out / seconds, 1),
        "total_tokens_per_second": round((num_in + num_out) / seconds, 1),
        "steps": after.num_steps - before.num_steps,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "prefix_cache_hits": after.prefix_cache_hits - before.prefix_cache_hits,
        "compiles": after.compiles_after_warmup,
    }


@contextmanager
def decoding(core: EngineCore, batch: int, vocab_size: int) -> Iterator[float]:
    """Meanwhile `batch` sequences decode and nothing else runs; gives their mean length so far."""
    core.reset_prefix_cache()
    ids = IdRange.below(vocab_size)
    requests = baseline_requests("C", batch, seed=None, ids=ids)
    for i, request in enumerate(requests):
        add(core, f"decode-{i}", replace(request, num_output_tokens=MAX_STEPS))
    outputs: Counter[str] = Counter()
    while len(outputs) < batch:
        outputs.update(item.request_id for item in core.step())
    for _ in range(SETTLING_STEPS):
        outputs.update(item.request_id for item in core.step())
    yield requests[0].num_input_tokens + outputs.total() / batch
    for i in range(batch):
        core.abort(f"decode-{i}")
    while core.has_work:
        core.step()


def decode_step(core: EngineCore, batch: int, vocab_size: int) -> dict[str, Any]:
    """Milliseconds per step while `batch` sequences decode at a context of about 1,100."""
    with decoding(core, batch, vocab_size) as length:
        start = time.perf_counter()
        for _ in range(DECODE_STEPS):
            assert len(core.step()) == batch, "a step in which not every sequence decoded"
        seconds = time.perf_counter() - start
    return {
        "batch": batch,
        "context": round(length + DECODE_STEPS / 2),
        "decode_step_ms": round(1e3 * seconds / DECODE_STEPS, 3),
        "compiles": core.stats().compiles_after_warmup,
    }


def at_concurrency(core: EngineCore, streams: int, vocab_size: int) -> dict[str, Any]:
    """Requests of 300 tokens in and 128 out, `streams` at a time: as one ends the next comes.

    Most steps only decode: theirs is the median; longer ones take in prompts.
    """
    core.reset_prefix_cache()
    requests = baseline_requests("E", WAVES * streams, seed=None, ids=IdRange.below(vocab_size))
    waiting = iter(enumerate(requests))
    times = [time.perf_counter()]
    for i, request in itertools.islice(waiting, streams):
        add(core, f"stream-{i}", request)
    while core.has_work:
        ended = sum(output.finish_reason is not None for output in core.step())
        for i, request in itertools.islice(waiting, ended):
            add(core, f"stream-{i}", request)
        times.append(time.perf_counter())
    seconds = times[-1] - times[0]
    steps = [after - before for before, after in itertools.pairwise(times)]
    median = statistics.median(steps)
    return {
        "streams": streams,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(128 * len(requests) / seconds, 1),
        "requests_per_second": round(len(requests) / seconds, 2),
        "steps": len(steps),
        "median_step_ms": round(1e3 * median, 3),
        "seconds_of_longer_steps": round(sum(each for each in steps if each > 2 * median), 3),
        "compiles": core.stats().compiles_after_warmup,
    }


def start(config: EngineConfig, source: ModelSource) -> tuple[EngineCore, dict[str, Any]]:
    """An engine, and what its start was like."""
    begin = time.perf_counter()
    core = EngineCore(config, source, progress=False)
    seconds = round(time.perf_counter() - begin, 1)
    return core, {"start_seconds": seconds, "kv_cache_tokens": core.memory.num_tokens}


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every figure that was asked for, as it comes."""
    config = engine_config(args)
    source = find_model(config)
    claim_devices(config)
    if jax.default_backend() == "gpu":
        yield {"device": jax.devices()[0].device_kind, **asdict(ceilings())}
    core, about = start(config, source)
    yield about
    vocab_size = source.config.vocab_size
    for batch in filter(None, args.batches.split(",")):
        yield decode_step(core, int(batch), vocab_size)
    for streams in filter(None, args.streams.split(",")):
        yield at_concurrency(core, int(streams), vocab_size)
    for name in filter(None, args.workloads.split(",")):
        yield run_workload(core, name, vocab_size)
    core.close()


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and the flags of an engine that matter to its speed."""
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--compile-cache-dir")
    parser.add_argument("--quantization", help="fp8, int8 or int4 weights")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine that `add_engine_arguments` describe, with random weights."""
    return EngineConfig(
        model=args.model,
        load_format="dummy",
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        compile_cache_dir=args.compile_cache_dir,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
    )


def main() -> None:
    """Start the engine and print a line of JSON per figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_engine_arguments(parser)
    parser.add_argument("--workloads", default="B1,B2,B3,B4,D", help="names; '' for none")
    parser.add_argument("--batches", default="1,8,32,128,256", help="sizes; '' for none")
    parser.add_argument("--streams", default="", help="requests of 300/128 at a time, by commas")
    for figure in figures(parser.parse_args()):
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
