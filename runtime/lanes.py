"""The policy "lanes": short requests are not buried by long ones, and long ones are not starved.

A request is long while more than `Lanes.long_prompt` tokens of its prompt are to be computed, which
leaves out what the prefix cache holds. While short ones are there, long ones get the rest of each
step's work alone, so that a step takes at most 1 / share times as long as it would without them.

A step takes the time of the shape that it is compiled for. So a long prompt's chunk ends where a
shape does, if it can: tokens in what were padding else cost their attention alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from paged.runtime.order import WaitingLine
from paged.runtime.sequence import Sequence
from paged.runtime.step_costs import StepCosts, padded

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
        alone: tokens' worth of long prompts in a step without short requests, from which on they
            go to the end of its shape: whoever comes waits for two such steps at most.
    """

    long_prompt: int = 2048
    share: float = 0.85
    most_long: int = 1
    alone: int = 2048

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
        costs: of steps.
        sizes: of steps with chunks, as they are compiled: tokens, ascending.
        work: tokens' worth of work that is left for their prompts.
        tokens: that are left for their prompts.
        num_taken: tokens of the step that are not for them, or taken by them already.
        num_paid: tokens of the shape that the step would have if these were all.
        num_running: long sequences.
        num_prompts: those of them whose prompts are being computed.
        num_behind: those of `num_prompts` that have no chunk in this step yet.
        is_wanted: whether there are any, if only waiting.
        is_alone: whether there are no short ones.
    """

    costs: StepCosts
    sizes: tuple[int, ...]
    work: float
    tokens: int
    num_taken: int
    num_paid: int
    num_running: int
    num_prompts: int
    num_behind: int
    is_wanted: bool
    is_alone: bool

    @property
    def reserved(self) -> int:
        """Tokens that short sequences keep away from."""
        return min(int(max(self.work, 0)), self.tokens) if self.is_wanted else 0

    def chunk(self, num_left: int, start: int) -> int:
        """Tokens of a long prompt to compute now, at least one, and note that they are."""
        self.num_behind = max(self.num_behind - 1, 0)
        taken = self.num_taken + LEAST_CHUNK * self.num_behind
        wanted = self.num_taken + self.costs.chunk(self.work, start)
        if self.is_alone:  # up to the end of a shape, be it more than their work
            length = padded(wanted, self.sizes) - taken
        else:
            length = self._within_work(taken, start, wanted)
        length = max(min(max(length, LEAST_CHUNK), self.tokens, num_left), 1)
        self.num_taken += length
        num_paid = max(padded(self.num_taken, self.sizes), self.num_paid)
        self.work -= num_paid - self.num_paid + self.costs.pairs * length * (start + length / 2)
        self.num_paid = num_paid
        self.tokens = max(self.tokens - length, 0)
        return length

    def _within_work(self, taken: int, start: int, wanted: int) -> int:
        """The most tokens from `start` on with which the step, padding included, is not too long.

        Args:
            taken: tokens of the step beside them, those kept for others among them.
            wanted: where they would end if there were no shapes.
        """
        ends = self.sizes[bisect_right(self.sizes, taken) :] or (wanted,)
        lengths = (
            self.costs.attending(self.work - (end - self.num_paid), start, end - taken)
            for end in ends
            if end - self.num_paid <= self.work
        )
        return max(lengths, default=0)


def long_share(
    lanes: Lanes,
    costs: StepCosts,
    budget: int,
    running: Iterable[Sequence],
    waiting: WaitingLine,
    num_slots: int,
    sizes: tuple[int, ...],
) -> LongShare:
    """What the next step may do for long sequences.

    Args:
        budget: tokens of a step.
        running: in any order.
        waiting: of whose short sequences `num_slots` at most can be admitted.
        sizes: see `LongShare`.
    """
    num_short_tokens = num_running = num_prompts = 0
    short = decodes = 0.0  # tokens' worth of work
    has_chunks = False
    for sequence in running:
        num_left = sequence.num_total - sequence.num_computed
        work = num_left if num_left > 1 else costs.of_decode(sequence.num_computed)
        if not sequence.is_long:
            short += work
            num_short_tokens += num_left
            has_chunks |= num_left > 1
            continue
        num_running += 1
        num_prompts += num_left > 1
        decodes += work if num_left <= 1 else 0
    for sequence in islice(waiting.short, num_slots):
        if short >= budget:
            break
        short += sequence.num_tokens
        num_short_tokens += sequence.num_tokens
        has_chunks = True
    kept = min(num_short_tokens, int(lanes.share * budget))
    num_decodes = num_running - num_prompts
    num_tokens = min(num_short_tokens + num_decodes, budget)
    num_paid = padded(num_tokens, sizes) if has_chunks else num_tokens
    work = (1 / lanes.share - 1) * (costs.fixed + short + num_paid - num_tokens)
    return LongShare(
        costs=costs,
        sizes=sizes,
        work=max((work if num_short_tokens else lanes.alone) - decodes, LEAST_CHUNK),
        tokens=budget - kept,
        num_taken=kept + num_decodes,
        num_paid=num_paid,
        num_running=num_running,
        num_prompts=num_prompts,
        num_behind=num_prompts,
        is_wanted=num_prompts > 0 or len(waiting.long) > 0,
        is_alone=not num_short_tokens,
    )
