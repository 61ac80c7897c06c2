"""How many pages long sequences take in models whose layers have windows, and how many fit at once.

    python benchmarks/window_pages.py --length 32768

Runs sequences of that many tokens through the real scheduler and pool, without a device, one step
ahead as the engine does. Each model has the memory that --room of them take when every layer keeps
everything. Said of each: how many groups its layers make, what share of the memory it would take
without windows a sequence holds at its end, how many run at once, and steps until all have ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from paged.groups import group_layers
from paged.pool import PagePool
from paged.runtime.plan import StepPlan
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import Sequence, SequenceLimits
from paged.runtime.simulation.replica import Replica

MODELS: dict[str, tuple[int | None, ...]] = {
    "no windows": (None,) * 32,
    "Mistral 7B v0.1": (4096,) * 32,
    "Gemma 2 9B": (4096, None) * 21,
    "Gemma 3 12B": (*[1024] * 5, None) * 8,
    "Gemma 3 27B": ((*[1024] * 5, None) * 11)[:62],
    "gpt-oss 20B": (128, None) * 12,
    "Command R7B": (*[4096] * 3, None) * 8,
}
"""The windows of their layers."""


@dataclass(frozen=True)
class Use:
    """What a workload took.

    Attributes:
        num_groups: of layers.
        share: of the memory that its longest sequence would take without windows, what it held in
            its last step.
        most: sequences running at once, of as many as there are.
        num_preemptions: sequences that had to give their pages back.
        num_steps: until all had ended.
    """

    num_groups: int
    share: float
    most: int
    num_preemptions: int
    num_steps: int


def scheduler_of(windows: tuple[int | None, ...], args: argparse.Namespace) -> Scheduler:
    """A scheduler for a model, with memory for `room` sequences that keep everything."""
    groups = group_layers(windows, args.length)
    config = SchedulerConfig(
        max_num_seqs=args.sequences,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.length,
        windows=tuple(group.window for group in groups),
    )
    entries = args.room * -(-args.length // args.page_size) * len(windows)
    layers_of_page = max(len(group.layers) for group in groups)
    pool = PagePool(entries // layers_of_page + 1, args.page_size)
    return Scheduler(config, pool)


def measure(windows: tuple[int | None, ...], args: argparse.Namespace) -> Use:
    """Run all sequences to their end, then one alone."""
    scheduler = scheduler_of(windows, args)
    most, num_steps, _ = _run(scheduler, args, range(args.sequences))
    num_preemptions = scheduler.num_preemptions
    _, _, held = _run(scheduler, args, [args.sequences])
    whole = (scheduler.pool.num_pages - 1) / args.room
    num_groups = len(scheduler.config.windows)
    return Use(num_groups, held / whole, most, num_preemptions, num_steps)


def _run(
    scheduler: Scheduler, args: argparse.Namespace, numbers: Iterable[int]
) -> tuple[int, int, int]:
    """Most sequences that ran at once, steps, and the pages in use in the last of them."""
    most = held = 0

    def look(plan: StepPlan) -> float:
        nonlocal most, held
        most, held = max(most, scheduler.num_running), scheduler.pool.num_used
        return 0.0

    replica = Replica(scheduler, look)
    for number in numbers:
        prompt = [number] * (args.length - args.outputs)
        replica.add(Sequence(number, prompt, SequenceLimits(args.outputs)))
    while replica.launch(0.0) is not None:
        replica.read()
    return most, replica.num_steps, held


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--length", type=int, default=32_768, help="tokens of a sequence")
    parser.add_argument("--outputs", type=int, default=256, help="those that it generates")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--room", type=int, default=8, help="sequences that fit without windows")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    args = parser.parse_args()
    print(f"{'':18}{'groups':>7}{'memory':>9}{'at once':>9}{'steps':>8}{'preempted':>11}")
    for name, windows in MODELS.items():
        use = measure(windows, args)
        print(
            f"{name:18}{use.num_groups:7}{use.share:9.1%}{use.most:9}{use.num_steps:8}"
            f"{use.num_preemptions:11}",
            flush=True,
        )


if __name__ == "__main__":
    main()
