"""The named workloads on one engine, and the time of a decode step by batch size.

    python benchmarks/offline_baselines.py MODEL --workloads B1,B4 --batches 1,32 [--json FILE]

MODEL is a folder with a config.json (weights are random). Token ids in and out; greedy; the engine
starts once. A decode step is timed by the clock over steps in which every sequence decodes, host
time included: 1,024 prompt tokens each, 96 steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paged.models.loading import resolve_model
from paged.runtime.bench.workloads import BenchRequest, IdRange, baseline_requests
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.messages import EngineRequest
from paged.runtime.sampling_params import SamplingParams

DECODE_STEPS = 96
# Batches reach full size long before their first sequence ends.
MAX_STEPS = 256


def add(core: EngineCore, name: str, request: BenchRequest) -> None:
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


def decode_step(core: EngineCore, batch: int, vocab_size: int) -> dict[str, Any]:
    """Milliseconds per step while `batch` sequences decode at a context of about 1,100."""
    core.reset_prefix_cache()
    ids = IdRange.below(vocab_size)
    for i, request in enumerate(baseline_requests("C", batch, seed=None, ids=ids)):
        add(core, f"decode-{i}", replace(request, num_output_tokens=MAX_STEPS))
    started: set[str] = set()
    while len(started) < batch:
        started |= {item.request_id for item in core.step()}
    for _ in range(8):
        core.step()
    start = time.perf_counter()
    for _ in range(DECODE_STEPS):
        assert len(core.step()) == batch, "a step in which not every sequence decoded"
    seconds = time.perf_counter() - start
    for i in range(batch):
        core.abort(f"decode-{i}")
    while core.has_work:
        core.step()
    return {"batch": batch, "decode_step_ms": round(1e3 * seconds / (DECODE_STEPS), 3)}


def results(
    core: EngineCore, args: argparse.Namespace, vocab_size: int
) -> Iterator[dict[str, Any]]:
    """Every figure that was asked for, as it comes."""
    for batch in filter(None, args.batches.split(",")):
        yield decode_step(core, int(batch), vocab_size)
    for name in filter(None, args.workloads.split(",")):
        yield run_workload(core, name, vocab_size)


def main() -> None:
    """Start the engine, print a line per figure, and write them all as JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--workloads", default="B1,B2,B3,B4,D")
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = resolve_model(args.model, load_format="dummy")
    config = EngineConfig(
        model=args.model,
        load_format="dummy",
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    start = time.perf_counter()
    core = EngineCore(config, source, progress=False)
    figures: list[dict[str, Any]] = [
        {
            "start_seconds": round(time.perf_counter() - start, 1),
            "kv_cache_tokens": core.memory.num_tokens,
        }
    ]
    print(figures[0], flush=True)
    for figure in results(core, args, source.config.vocab_size):
        figures.append(figure)
        print(figure, flush=True)
    core.close()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
