"""How much KV memory the scheduler wastes, and how much work the prefix cache and the pool spare.

Simulates traffic through the real scheduler and pool, without a device, one step ahead as the
engine runs them. Lengths are log-normal, as those of chat requests are. Two workloads: sequences
with nothing in common, and sequences behind one shared prefix, where the tokens that the prefix
cache must find are known beforehand.

    python benchmarks/kv_waste.py --num-pages 2000 --growth-steps 0
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from paged.pool import PagePool
from paged.runtime.plan import StepPlan
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import Sequence, SequenceLimits

MEAN_PROMPT, MEAN_OUTPUT, SIGMA = 220, 200, 1.0
SHORTEST, LONGEST = 4, 1024
VOCABULARY = 50_000


@dataclass(frozen=True)
class Report:
    """What a workload came to.

    Attributes:
        num_steps: steps in which something ran.
        waste: share of the token places in held pages that held no token, mean over steps.
        usage: share of the pool's pages held, mean over steps.
        num_preemptions: sequences that had to give their pages back.
        recomputed: share of the tokens computed that had been computed before.
        prefix_queries: prompt tokens looked up in the prefix cache.
        prefix_hits: those of them that were found.
    """

    num_steps: int
    waste: float
    usage: float
    num_preemptions: int
    recomputed: float
    prefix_queries: int
    prefix_hits: int


def chat_sequences(count: int, seed: int = 0) -> list[Sequence]:
    """Sequences of log-normal lengths with nothing in common."""
    random = Random(seed)
    return [
        Sequence(
            sequence_id=number,
            prompt=_tokens(random, _length(random, MEAN_PROMPT)),
            limits=SequenceLimits(max_tokens=_length(random, MEAN_OUTPUT)),
        )
        for number in range(count)
    ]


def shared_prefix_sequences(
    count: int, prefix_length: int, suffix_length: int, seed: int = 0
) -> list[Sequence]:
    """Sequences whose prompts begin with the same tokens and then differ."""
    random = Random(seed)
    prefix = _tokens(random, prefix_length)
    # The number of the sequence comes first, so that no two suffixes begin alike.
    return [
        Sequence(
            sequence_id=number,
            prompt=[*prefix, VOCABULARY + number, *_tokens(random, suffix_length - 1)],
            limits=SequenceLimits(max_tokens=_length(random, MEAN_OUTPUT)),
        )
        for number in range(count)
    ]


def expected_hits(count: int, prefix_length: int, page_size: int) -> int:
    """Tokens that the cache must find: all but the first sequence find the prefix's full pages."""
    return (count - 1) * (prefix_length // page_size) * page_size


def simulate(scheduler: Scheduler, sequences: list[Sequence]) -> Report:
    """Run all sequences to their end, all of them waiting from the beginning."""
    for sequence in sequences:
        scheduler.add(sequence)
    waste, usage, num_computed = [], [], 0
    for plan in _run(scheduler, Random(1)):
        waste.append(scheduler.kv_waste)
        usage.append(scheduler.kv_usage)
        num_computed += plan.num_tokens
    # The last token of a sequence is sampled but never computed.
    num_needed = sum(sequence.num_tokens - 1 for sequence in sequences) - scheduler.prefix_hits
    return Report(
        num_steps=len(waste),
        waste=sum(waste) / len(waste),
        usage=sum(usage) / len(usage),
        num_preemptions=scheduler.num_preemptions,
        recomputed=1 - num_needed / num_computed,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
    )


def _run(scheduler: Scheduler, random: Random) -> Iterator[StepPlan]:
    """Yield each plan when it is scheduled; read it after the next one is."""
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_work or in_flight:
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
            yield plan
        if in_flight and (plan is None or len(in_flight) > 1):
            oldest = in_flight.popleft()
            scheduler.update(oldest, _tokens(random, len(oldest.rows)))


def _length(random: Random, mean: float) -> int:
    drawn = random.lognormvariate(log(mean) - SIGMA**2 / 2, SIGMA)
    return int(min(max(drawn, SHORTEST), LONGEST))


def _tokens(random: Random, count: int) -> list[int]:
    return random.choices(range(VOCABULARY), k=count)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-sequences", type=int, default=3000)
    parser.add_argument("--num-pages", type=int, default=20_000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--growth-steps", type=int, default=SchedulerConfig.growth_steps)
    parser.add_argument("--prefix-length", type=int, default=500)
    return parser.parse_args()


def _scheduler(args: argparse.Namespace) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.prefix_length + 2 * LONGEST,
        growth_steps=args.growth_steps,
    )
    return Scheduler(config, PagePool(args.num_pages + 1, args.page_size))


def _print(name: str, report: Report) -> None:
    print(
        f"{name}: {report.num_steps} steps, KV waste {report.waste:.2%}, "
        f"KV usage {report.usage:.1%}, {report.num_preemptions} preemptions, "
        f"{report.recomputed:.2%} of the computed tokens were computed before"
    )


def main() -> None:
    """Run both workloads with the settings given."""
    args = _parse_args()
    count, length = args.num_sequences, args.prefix_length
    _print("nothing in common", simulate(_scheduler(args), chat_sequences(count)))
    report = simulate(_scheduler(args), shared_prefix_sequences(count, length, MEAN_PROMPT))
    _print(f"{length} tokens in common", report)
    expected = expected_hits(count, length, args.page_size)
    print(
        f"prefix cache: {report.prefix_hits} of {report.prefix_queries} prompt tokens found "
        f"({report.prefix_hits / report.prefix_queries:.2%}), {expected} expected"
    )


if __name__ == "__main__":
    main()
