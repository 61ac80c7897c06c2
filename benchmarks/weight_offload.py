"""What weights in host memory cost: steps with more and more layers there.

    python benchmarks/weight_offload.py MODEL --cpu-offload-gb 0,4,8 [--json FILE]

For each size a start, with random weights: bytes that left the device and tokens that its pages
then hold, milliseconds per step while 1 and while 32 sequences decode, prompt tokens per second of
one prompt that fills steps, and whether the greedy answers are those of the first size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.offline_baselines import add, add_engine_arguments, engine_config
from paged.models.loading import resolve_model
from paged.runtime.bench.workloads import BenchRequest
from paged.runtime.core import EngineCore

BATCHES = (1, 32)
WARM_STEPS, TIMED_STEPS = 4, 12


@dataclass(frozen=True)
class Result:
    """One start; see the module.

    Attributes:
        decode_ms: by the number of sequences.
    """

    cpu_offload_gb: float
    weights_on_host_gb: float
    kv_cache_tokens: int
    decode_ms: dict[int, float]
    prompt_tokens_per_s: float
    same_answers: bool
    compiles: int


def ask(core: EngineCore, name: str, num_prompt: int, num_output: int, seed: int) -> None:
    """Queue a request of random tokens."""
    tokens = np.random.default_rng(seed).integers(0, core.vocab_size, num_prompt)
    add(core, name, BenchRequest(tokens.tolist(), num_prompt, num_output))


def decode_ms(core: EngineCore, batch: int) -> tuple[float, list[list[int]]]:
    """Milliseconds per step of so many sequences, and what they answer."""
    answers: dict[str, list[int]] = {}
    for number in range(batch):
        ask(core, f"{batch}-{number}", 16, WARM_STEPS + TIMED_STEPS + 4, number)
    num_steps, started = 0, 0.0
    while core.has_work:
        if num_steps == WARM_STEPS:
            started = time.perf_counter()
        news = core.step()
        for item in news:
            answers.setdefault(item.request_id, []).extend(item.token_ids)
        num_steps += bool(news)
        if num_steps == WARM_STEPS + TIMED_STEPS:
            seconds = time.perf_counter() - started
    return 1e3 * seconds / TIMED_STEPS, [answers[name] for name in sorted(answers)]


def prompt_rate(core: EngineCore, num_tokens: int) -> float:
    """Prompt tokens per second of one long prompt."""
    ask(core, "long", num_tokens, 1, seed=99)
    started = time.perf_counter()
    while core.has_work:
        core.step()
    return num_tokens / (time.perf_counter() - started)


def measure(args: argparse.Namespace) -> Iterator[Result]:
    """Every size, as it is measured."""
    source = resolve_model(args.model, load_format="dummy")
    first: list[list[list[int]]] = []
    for size in map(float, args.cpu_offload_gb.split(",")):
        config = replace(engine_config(args), cpu_offload_gb=size, enable_prefix_caching=False)
        core = EngineCore(config, source, progress=False)
        timed = {batch: decode_ms(core, batch) for batch in BATCHES if batch <= args.max_num_seqs}
        answers = [answer for _, answer in timed.values()]
        first = first or answers
        yield Result(
            cpu_offload_gb=size,
            weights_on_host_gb=round(core.memory.weights_on_host / 2**30, 3),
            kv_cache_tokens=core.memory.num_tokens,
            decode_ms={batch: round(ms, 2) for batch, (ms, _) in timed.items()},
            prompt_tokens_per_s=round(prompt_rate(core, args.max_model_len - 1)),
            same_answers=answers == first,
            compiles=core.stats().compiles_after_warmup,
        )
        core.close()


def main() -> None:
    """Measure, and print a line of JSON per size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add_engine_arguments(parser)
    parser.set_defaults(max_num_seqs=32, max_num_batched_tokens=2048)
    parser.add_argument("--cpu-offload-gb", default="0,4,8", help="sizes, GiB, by commas")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    told = []
    for result in measure(args):
        print(json.dumps(asdict(result)), flush=True)
        told.append(asdict(result))
        if args.json:
            args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
