"""One very long prompt while short sequences decode: what it waits for, and what they do.

    python benchmarks/long_prompt.py MODEL --max-model-len 131072 --max-num-seqs 64 \\
        --cases 8192:0,8192:2048,8192:1024,8192:512,2048:0 [--json FILE]

A case is the step's tokens and the most of one prompt among them (0 for no limit), which is what
--max-num-batched-tokens and --long-prefill-token-threshold set for a server; the engine starts once
and its scheduler is told. In each case `--decoding` sequences decode, then a prompt of `--tokens`
tokens comes, prefilled in chunks while they go on. Told are its time to first token and the gaps
between the others' tokens, before it came and until its first token. Token ids, greedy, no cache
hits, random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.offline_baselines import add, add_engine_arguments, engine_config
from paged.models.loading import resolve_model
from paged.runtime.bench.workloads import BenchRequest, IdRange, random_requests
from paged.runtime.core import EngineCore

LONG = "long"
SHORT_PROMPT = 300
STEPS_BEFORE = 200


@dataclass(frozen=True)
class Limits:
    """Most tokens of a step, and of one prompt in it (0 for no limit)."""

    step_tokens: int
    prompt_tokens: int

    @classmethod
    def parse(cls, case: str) -> Limits:
        """From STEP:PROMPT."""
        return cls(*map(int, case.split(":")))


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between two tokens of a sequence."""

    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: list[float]) -> Gaps:
        p50, p99, longest = 1e3 * np.percentile(seconds, (50, 99, 100))
        return cls(round(p50, 2), round(p99, 2), round(longest, 2))

    def __str__(self) -> str:
        return f"{self.p50:.1f}, {self.p99:.1f}, {self.longest:.1f}"


@dataclass(frozen=True)
class Result:
    """One case.

    Attributes:
        limits: what the scheduler kept to.
        ttft: seconds to the long prompt's first token.
        steps: steps that took.
        before, during: gaps of the others.
    """

    limits: Limits
    ttft: float
    steps: int
    before: Gaps
    during: Gaps

    def row(self) -> str:
        """Of the table."""
        step, prompt = self.limits.step_tokens, self.limits.prompt_tokens or "any"
        cells = (step, prompt, f"{self.ttft:.2f}", self.steps, self.before, self.during)
        return f"| {' | '.join(map(str, cells))} |"


TITLES = (
    "step tokens",
    "of a prompt",
    "TTFT, s",
    "steps",
    "ITL before: p50, p99, max, ms",
    "during",
)


@dataclass
class Watch:
    """Steps an engine and notes when each sequence's tokens come."""

    core: EngineCore
    last: dict[str, float] = field(default_factory=dict)

    def step(self) -> list[float]:
        """Seconds since the token before, for each sequence that got another."""
        outputs = self.core.step()
        now = time.perf_counter()
        known = [each.request_id for each in outputs if each.request_id in self.last]
        gaps = [now - self.last[name] for name in known]
        self.last |= {each.request_id: now for each in outputs}
        return gaps


@contextmanager
def kept(core: EngineCore, limits: Limits) -> Iterator[None]:
    """Meanwhile the scheduler keeps to the limits."""
    scheduler = core._scheduler
    changed = replace(
        scheduler.config,
        max_num_batched_tokens=limits.step_tokens,
        long_prefill_token_threshold=limits.prompt_tokens,
    )
    with patch.object(scheduler, "config", changed):
        yield


def measure(
    core: EngineCore, limits: Limits, short: list[BenchRequest], long: BenchRequest
) -> Result:
    """Let the short ones decode, then add the long one and wait for its first token."""
    core.reset_prefix_cache()
    watch, before, during = Watch(core), [], []
    with kept(core, limits):
        for i, request in enumerate(short):
            add(core, str(i), request)
        while len(watch.last) < len(short):
            watch.step()
        for _ in range(STEPS_BEFORE):
            before += watch.step()
        add(core, LONG, long)
        start, steps = time.perf_counter(), core.stats().num_steps
        while LONG not in watch.last:
            during += watch.step()
        ttft, steps = watch.last[LONG] - start, core.stats().num_steps - steps
        for name in watch.last:
            core.abort(name)
        while core.has_work:
            core.step()
    return Result(limits, round(ttft, 3), steps, Gaps.of(before), Gaps.of(during))


def results(args: argparse.Namespace) -> Iterator[Result]:
    """Every case."""
    source = resolve_model(args.model, load_format="dummy")
    core = EngineCore(engine_config(args), source, progress=False)
    room = core.max_model_len - max(args.tokens, SHORT_PROMPT)
    if room < 1:
        raise SystemExit(
            f"--tokens is {args.tokens}, which with an output token is more than the "
            f"{core.max_model_len} tokens of --max-model-len"
        )
    ids = IdRange.below(source.config.vocab_size)
    for number, case in enumerate(args.cases.split(",")):
        length = core.max_model_len - SHORT_PROMPT
        short = random_requests(args.decoding, SHORT_PROMPT, length, seed=2 * number, ids=ids)
        [long] = random_requests(1, args.tokens, 1, seed=2 * number + 1, ids=ids)
        yield measure(core, Limits.parse(case), short, long)
    core.close()


def main() -> None:
    """Measure, and print a row of a table for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_engine_arguments(parser)
    parser.add_argument("--tokens", type=int, default=100_000, help="of the long prompt")
    parser.add_argument("--decoding", type=int, default=32, help="sequences that decode")
    parser.add_argument("--cases", default="8192:0,8192:2048,8192:1024,8192:512,2048:0")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    print(f"| {' | '.join(TITLES)} |\n|{' --- |' * len(TITLES)}")
    told = []
    for result in results(args):
        print(result.row(), flush=True)
        told.append(asdict(result))
        if args.json:
            args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
