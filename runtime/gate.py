"""Who may wait: a bound on the queue, and no request that would miss its deadline in it.

All that is known of the queue is counted in the core, which every API process sends its requests
to: so one bound holds for all of them together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from paged.runtime.messages import EngineRequest, Refusal, Terms
from paged.runtime.plan import StepPlan
from paged.runtime.scheduler import Scheduler

# Seconds after which a measurement counts for a third.
_MEMORY = 20.0
# Seconds of measurements, at least, before anybody is told how long the queue takes.
_LEAST_MEASURED = 0.05


@dataclass
class DrainRate:
    """How many prompt tokens of a lane are computed in a second while some are to be."""

    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step."""
        kept = math.exp(-seconds / _MEMORY)
        self.tokens = kept * self.tokens + num_tokens
        self.seconds = kept * self.seconds + seconds

    def seconds_for(self, num_tokens: float) -> float:
        """How long so many tokens take; 0 while that is not known."""
        if self.seconds < _LEAST_MEASURED or not self.tokens:
            return 0.0
        return num_tokens * self.seconds / self.tokens


class Deadlines:
    """The deadlines of requests, whether these still live or not."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request: EngineRequest) -> None:
        """Keep the request's deadline, if it has one."""
        if request.terms.deadline:
            heappush(self._heap, (request.terms.deadline, request.request_id))

    def passed(self, now: float) -> list[str]:
        """Ids of the requests whose deadlines have passed, once each."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heappop(self._heap)[1])
        return found

    def clear(self) -> None:
        """Forget them all."""
        self._heap.clear()


@dataclass(frozen=True)
class Queue:
    """The queue as it is.

    Attributes:
        num_waiting: sequences that have never run.
        num_free: that could begin in the next step.
        num_slots: that can run at once.
        backlog: prompt tokens that are to be computed, by lane: of short sequences, of long ones.
        longest_short: tokens of a prompt that is for the lane of short ones at most.
    """

    num_waiting: int
    num_free: int
    num_slots: int
    backlog: tuple[int, int]
    longest_short: float = math.inf

    @classmethod
    def of(cls, scheduler: Scheduler, coming: Sequence[EngineRequest]) -> Queue:
        """The scheduler's, and requests that are on their way there."""
        (short, long), config = scheduler.backlog, scheduler.config
        return cls(
            num_waiting=scheduler.num_waiting + sum(each.params.n for each in coming),
            num_free=scheduler.num_free_slots,
            num_slots=config.max_num_seqs,
            backlog=(short + sum(len(each.prompt_token_ids) for each in coming), long),
            longest_short=config.lanes.long_prompt if config.policy == "lanes" else math.inf,
        )


@dataclass
class Gate:
    """Refuses what the queue has no room for.

    Attributes:
        max_sequences: that may wait; None for any number.
        max_tokens: prompt tokens that may be yet to be computed; None for any number.
        refused: how many requests, by cause.
    """

    max_sequences: int | None = None
    max_tokens: int | None = None
    refused: dict[str, int] = field(
        default_factory=lambda: {"queue": 0, "tokens": 0, "deadline": 0, "size": 0}
    )
    rates: tuple[DrainRate, DrainRate] = field(default_factory=lambda: (DrainRate(), DrainRate()))

    def refusal(self, request: EngineRequest, queue: Queue) -> Refusal | None:
        """Why a request cannot be taken on its terms; None if it can."""
        terms = request.terms
        is_long = len(request.prompt_token_ids) > queue.longest_short
        found = self._too_late(terms, queue, is_long) or self._too_many(terms, queue)
        if found is not None:
            self.refused[found.cause] += 1
        return found

    def observe(self, plan: StepPlan, backlog: Sequence[int], seconds: float) -> None:
        """Take note of a step that was planned while prompts, or parts of them, waited."""
        done = [0, 0]
        for row in plan.rows:
            if (num_left := len(row.sequence.prompt) - row.start) > 0:
                done[row.sequence.is_long] += min(row.length, num_left)
        for rate, num_tokens, num_left in zip(self.rates, done, backlog, strict=True):
            if num_tokens or num_left:
                rate.observe(num_tokens, seconds)

    def room(self, queue: Queue) -> int | None:
        """Sequences that would be taken now; None for any number."""
        if self.max_tokens is not None and 0 < self.max_tokens <= sum(queue.backlog):
            return 0
        if self.max_sequences is None:
            return None
        return max(self.max_sequences + queue.num_free - queue.num_waiting, 0)

    def wait(self, queue: Queue, *, is_long: bool = False) -> float:
        """Seconds that a newcomer waits for its turn, by the rates of late."""
        return self.rates[is_long].seconds_for(queue.backlog[is_long])

    def retry_after(self, queue: Queue, num_sequences: int = 1) -> float:
        """Seconds until so many of those that wait are likely to be gone: 1 at least."""
        waiting = max(queue.num_waiting, 1)
        share = min(num_sequences / waiting, 1.0)
        seconds = sum(
            rate.seconds_for(tokens * share)
            for rate, tokens in zip(self.rates, queue.backlog, strict=True)
        )
        return max(seconds, 1.0)

    def _too_late(self, terms: Terms, queue: Queue, is_long: bool) -> Refusal | None:
        if not terms.deadline:
            return None
        left, wait = terms.deadline - time.monotonic(), self.wait(queue, is_long=is_long)
        if left > wait:
            return None
        if not left > 0:
            return Refusal("deadline", "The request's time was over before it could begin", 0.0)
        message = f"{left:.1f} s are left for the request, and the queue takes about {wait:.1f}"
        return Refusal("deadline", message, max(wait - left, 1.0))

    def _too_many(self, terms: Terms, queue: Queue) -> Refusal | None:
        wanted, backlog = terms.num_sequences, sum(queue.backlog)
        if not wanted:
            return None
        if self.max_sequences is not None:
            most = self.max_sequences + queue.num_slots
            if wanted > most:
                message = f"A request may ask for {most} sequences here, got {wanted}"
                return Refusal("size", message, 0.0)
            excess = queue.num_waiting + wanted - queue.num_free - self.max_sequences
            if excess > 0:
                message = f"The queue is full: {queue.num_waiting} sequences wait"
                return Refusal("queue", message, self.retry_after(queue, excess))
        if self.max_tokens is not None and backlog and backlog + terms.num_tokens > self.max_tokens:
            message = f"The queue is full: {backlog} prompt tokens are yet to be computed"
            return Refusal("tokens", message, self.retry_after(queue))
        return None
