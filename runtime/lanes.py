"""The policy "lanes": short requests are not buried by long ones, and long ones are not starved.

A request is long while more than `Lanes.long_prompt` tokens of its prompt are to be computed, which
leaves out what the prefix cache holds. While short ones are there, long ones get the rest of each
step's work alone, so that a step takes at most 1 / share times as long as it would without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from paged.runtime.order import WaitingLine
from paged.runtime.sequence import Sequence
from paged.runtime.step_costs import StepCosts

LEAST_CHUNK = 16
"""Tokens that a long prompt advances by in a step at least, if the step has room for them."""

RESERVE = 1 / 8
"""Share of pages and slots that long sequences, beside the first of them, leave free."""


@dataclass(frozen=True)
class Lanes:
    """How steps are shared.

    Attributes:
        long_prompt: tokens to be computed, above which a request is long.
        share: of a step's work that is kept for short requests while there are any.
        most_long: long prompts that are computed at the same time.
        alone: tokens' worth of long prompts in a step without short requests: whoever comes waits
            for two such steps at most.
    """

    long_prompt: int = 2048
    share: float = 0.85
    most_long: int = 1
    alone: int = 1024

    def __post_init__(self) -> None:
        if not 0.5 <= self.share < 1:
            raise ValueError(f"share must be at least 0.5 and below 1, got {self.share}")
        if min(self.long_prompt, self.most_long, self.alone) < 1:
            raise ValueError(f"long_prompt, most_long and alone must be at least 1, got {self}")


DEFAULT_LANES = Lanes()


@dataclass
class LongShare:
    """What a step may do for long sequences.

    Attributes:
        work: tokens' worth of work that is left for their prompts.
        tokens: that are left for their prompts.
        num_running: long sequences.
        num_prompts: those of them whose prompts are being computed.
        is_wanted: whether there are any, if only waiting.
    """

    costs: StepCosts
    work: float
    tokens: int
    num_running: int
    num_prompts: int
    is_wanted: bool

    @property
    def reserved(self) -> int:
        """Tokens that short sequences keep away from."""
        return min(int(max(self.work, 0)), self.tokens) if self.is_wanted else 0

    def chunk(self, num_left: int, start: int) -> int:
        """Tokens of a long prompt to compute now, at least one, and note that they are."""
        length = max(min(self.costs.chunk(self.work, start), self.tokens), 1)
        length = min(length, num_left)
        self.work -= length * (1 + self.costs.pairs * (start + length / 2))
        self.tokens = max(self.tokens - length, 0)
        return length


def long_share(
    lanes: Lanes,
    costs: StepCosts,
    budget: int,
    running: Iterable[Sequence],
    waiting: WaitingLine,
    num_slots: int,
) -> LongShare:
    """What the next step may do for long sequences.

    Args:
        budget: tokens of a step.
        running: in any order.
        waiting: of whose short sequences `num_slots` at most can be admitted.
    """
    short, decodes, num_running, num_prompts = 0.0, 0.0, 0, 0
    for sequence in running:
        num_left = sequence.num_total - sequence.num_computed
        work = num_left if num_left > 1 else costs.of_decode(sequence.num_computed)
        if not sequence.is_long:
            short += work
            continue
        num_running += 1
        num_prompts += num_left > 1
        decodes += work if num_left <= 1 else 0
    for sequence in islice(waiting.short, num_slots):
        if short >= budget:
            break
        short += sequence.num_tokens
    work = (1 / lanes.share - 1) * (costs.fixed + short) if short else lanes.alone
    kept = int(min(short, lanes.share * budget))
    return LongShare(
        costs=costs,
        work=max(work - decodes, LEAST_CHUNK),
        tokens=budget - kept,
        num_running=num_running,
        num_prompts=num_prompts,
        is_wanted=num_prompts > 0 or len(waiting.long) > 0,
    )
