"""Which sequences advance in a step, by how many tokens, and in which pages.

There is no prefill phase and no decode phase: each step shares out a budget of tokens so that every
sequence's computed tokens catch up with its known ones. Running sequences come first, then waiting
ones while slots, budget and pages last. When pages run out, the last running sequence is preempted:
it gives back all its pages and later computes them again, mostly from the prefix cache.

The caller may schedule any number of steps before it reads the first one's tokens, as long as the
device runs them in order. Everything here counts by schedule: what a step will write is taken as
written, since only later steps (or the attention of the same step, which comes after its writes)
read it. Pages are given back at once for the same reason: their next owner's step comes later.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Literal

from paged.groups import Windows, most_pages
from paged.pool import PagePool
from paged.runtime.draft import Draft
from paged.runtime.lanes import DEFAULT_LANES, RESERVE, Lanes, long_share
from paged.runtime.load_costs import FREE, LoadCosts
from paged.runtime.order import ORDERS, Line, WaitingLine
from paged.runtime.page_tables import PageTables, Prefix
from paged.runtime.plan import Row, StepPlan, TokenEvent
from paged.runtime.sequence import FinishReason, Sequence, Status
from paged.runtime.step_costs import StepCosts


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step.

    Attributes:
        max_num_seqs: sequences running at once, and so slots.
        max_num_batched_tokens: tokens in a step.
        max_model_len: tokens of a sequence, prompt and outputs.
        policy: the order of service, see `paged.runtime.order`.
        enable_chunked_prefill: whether a prompt may be spread over steps.
        long_prefill_token_threshold: tokens of one prompt in a step at most; 0 for no limit.
        growth_steps: for how many steps of decoding an admission leaves pages to those that run
            already. With none, a newcomer to a full pool is soon preempted for their next pages.
            As `benchmarks/kv_waste.py` measures it in 2,000 (5,000) pages, 16 % (11 %) of the
            tokens computed had been computed before; room for 8 steps makes that 2.4 % (0.03 %),
            for 1.1 % more steps.
        windows: of the groups of layers.
        load_costs: of pages in host memory.
        lanes: how short and long ones share steps, under the policy "lanes".
        step_sizes: tokens of the shapes that steps with chunks are compiled for, ascending. With
            none, no step is taken to be padded.
        num_stages: steps that the device works on at a time. So many steps lie between two in which
            a sequence gets a token, and each has its share of those that decode.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Literal["fcfs", "priority", "lanes"] = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    growth_steps: int = 8
    windows: Windows = (None,)
    load_costs: LoadCosts = FREE
    lanes: Lanes = DEFAULT_LANES
    step_sizes: tuple[int, ...] = ()
    num_stages: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs must be between 1 and max_num_batched_tokens "
                f"({self.max_num_batched_tokens}), so that every running sequence can advance in "
                f"each step; got {self.max_num_seqs}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) "
                f"must be at least max_model_len ({self.max_model_len}): raise the one, lower the "
                f"other or enable chunked prefill"
            )
        if self.policy == "lanes" and not self.enable_chunked_prefill:
            raise ValueError("the policy lanes needs chunked prefill: long prompts take many steps")
        if self.policy not in ORDERS:
            raise ValueError(f"policy must be one of {', '.join(ORDERS)}, got {self.policy!r}")

    @property
    def longest_chunk(self) -> int:
        """Tokens of one sequence in a step at most."""
        if not self.enable_chunked_prefill:
            return self.max_model_len
        threshold = self.long_prefill_token_threshold or self.max_num_batched_tokens
        return min(threshold, self.max_num_batched_tokens, self.max_model_len)


class Scheduler:
    """Owns the lives of sequences, from `add` to the event or call that finishes them.

    Attributes:
        prefix_queries: prompt tokens looked up in the prefix cache at first admissions.
        prefix_hits: those of them that were found in pages.
        host_queries: the others of them, looked up in host memory.
        host_hits: those of these that were found there, worth loading.
        num_preemptions: times a sequence had to give its pages back.
        backlog: prompt tokens yet to be computed, by lane: of short sequences, of long ones.
        costs: what steps cost, for the policy "lanes"; whoever runs them may learn better ones.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self.pool = pool
        longest, chunk = config.max_model_len, config.longest_chunk
        num_pages = most_pages(config.windows, longest, chunk, pool.page_size)
        if num_pages >= pool.num_pages:
            raise ValueError(
                f"max_model_len {longest} takes {num_pages} pages of {pool.page_size} tokens, and "
                f"the pool has {pool.num_pages - 1}: lower max_model_len or give the cache more "
                f"memory"
            )
        self._tables = PageTables(pool, config.windows, chunk, config.load_costs)
        self.prefix_queries = self.prefix_hits = 0
        self.host_queries = self.host_hits = 0
        self.num_preemptions = 0
        self.backlog = [0, 0]
        self.costs = StepCosts()
        self._lanes = config.lanes if config.policy == "lanes" else None
        self._sequences: dict[int, Sequence] = {}
        self._running = Line(ORDERS[config.policy])
        self._waiting = WaitingLine(ORDERS[config.policy])
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))  # a stack: 0 goes first
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot: not admitted yet, or preempted."""
        return len(self._sequences) - len(self._running)

    def in_order(self) -> list[Sequence]:
        """All sequences in their order of service, the running ones first."""
        waiting = [each for each in self._sequences.values() if each.slot is None]
        return [*self._running, *sorted(waiting, key=ORDERS[self.config.policy])]

    @property
    def num_waiting_long(self) -> int:
        return len(self._waiting.long)

    @property
    def num_running_long(self) -> int:
        return sum(each.is_long for each in self._running) if self._lanes else 0

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def kv_usage(self) -> float:
        """Share of the pool's pages that sequences hold."""
        return self.pool.num_used / (self.pool.num_pages - 1)

    @property
    def kv_waste(self) -> float:
        """Share of the token places in held pages that hold no token. (A shared page is full.)"""
        held = self.pool.num_used * self.pool.page_size
        page_size = self.pool.page_size
        empty = sum(
            len(table) * page_size - each.num_computed
            for each in self._running
            for table in each.page_tables
        )
        return empty / held if held else 0.0

    def would_be_long(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens to compute is for the lane of long ones."""
        return self._lanes is not None and num_tokens > self._lanes.long_prompt

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence; a parent must have been added before its forks, or be none any more.

        Raises:
            ValueError: it has no prompt, or it could outgrow max_model_len.
        """
        longest = len(sequence.prompt) + sequence.limits.max_tokens
        if not sequence.prompt or longest > self.config.max_model_len:
            raise ValueError(
                f"a prompt needs at least one token and, with max_tokens, at most max_model_len "
                f"({self.config.max_model_len}); got {len(sequence.prompt)} prompt tokens and "
                f"max_tokens {sequence.limits.max_tokens}"
            )
        assert sequence.sequence_id not in self._sequences, "a sequence_id is taken"
        self._sequences[sequence.sequence_id] = sequence
        if sequence.parent and sequence.parent.sequence_id not in self._sequences:
            sequence.parent = None  # ended before it was queued: it computes no prompt
        sequence.is_long = self._is_long(sequence)
        if sequence.parent is None:
            self._count_backlog(sequence, len(sequence.prompt))
        self._waiting.add(sequence)

    def abort(self, sequence_ids: abc.Iterable[int]) -> list[Sequence]:
        """Finish sequences on behalf of whoever asked for them; see `finish`."""
        return self.finish(sequence_ids, FinishReason.ABORT)

    def finish(self, sequence_ids: abc.Iterable[int], reason: FinishReason) -> list[Sequence]:
        """Finish sequences for a reason found outside; return those that were still alive.

        What steps in flight still sample for them is dropped.
        """
        alive = [self._sequences[i] for i in dict.fromkeys(sequence_ids) if i in self._sequences]
        for sequence in alive:
            self._finish(sequence, reason)
        return alive

    def fail_all(self) -> list[Sequence]:
        """Finish every sequence after a failed step, whose pages may hold anything."""
        failed = self.finish(list(self._sequences), FinishReason.ERROR)
        self.pool.reset_prefix_cache()
        return failed

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; refused (False) while sequences hold pages."""
        return self.pool.reset_prefix_cache()

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if nothing can advance before a step in flight is read.

        Before it is asked again then, all steps must have gone through all stages of the device.
        """
        draft = Draft(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        if self._lanes is not None:
            draft.long = long_share(
                self._lanes,
                self.costs,
                draft.budget,
                self._running,
                self._waiting,
                len(self._free_slots),
                self.config.step_sizes,
            )
        preempted = self._schedule_running(draft)
        if not preempted:
            self._schedule_waiting(draft)
        if not (draft.decodes or draft.chunks):
            self._step += self.config.num_stages
            return None
        self._step += 1
        plan = draft.finish(self.pool.take_moves())
        self.pool.release(draft.sources)  # whoever takes them writes in a later step
        if self._waiting.has_forks:
            for row in plan.rows:
                if row.samples:
                    self._waiting.release_forks(row.sequence)
        return plan

    def update(self, plan: StepPlan, tokens: abc.Sequence[int]) -> list[TokenEvent]:
        """Take in what a step sampled. Steps are read in the order of their schedule.

        Args:
            tokens: one per row of the plan, and perhaps padding. Those of rows that do not sample
                are ignored; a negative one ends its sequence with an error.
        """
        assert len(tokens) >= len(plan.rows), "a row has no token"
        events, page_size = [], self.pool.page_size
        for index, (row, token) in enumerate(zip(plan.rows, tokens, strict=False)):
            sequence = row.sequence
            if not row.samples:
                continue
            if token < 0:  # also of a sequence that has left its pages to others
                self._tables.forget(sequence)
            if sequence.status is Status.FINISHED:
                continue
            if token < 0:
                self._finish(sequence, FinishReason.ERROR)
                events.append(TokenEvent(sequence, index, token, FinishReason.ERROR))
                continue
            sequence.outputs.append(token)
            sequence.num_pending -= 1
            if sequence.num_tokens % page_size == 0:
                self._tables.register(sequence)
            reason = _finish_reason(sequence, token)
            if reason is not None:
                if reason is FinishReason.STOP and token not in sequence.limits.eos_token_ids:
                    sequence.stop_reason = token
                self._finish(sequence, reason)
            events.append(TokenEvent(sequence, index, token, reason))
        return events

    def _schedule_running(self, draft: Draft) -> bool:
        """Advance the running sequences; return whether one had to be preempted for it."""
        num_preemptions, num_stages = self.num_preemptions, self.config.num_stages
        most_decodes = -(-len(self._running) // num_stages)
        # A preemption removes the last in line, which has no row yet: the loop only ends sooner.
        for index, sequence in enumerate(self._running):
            num_outputs = len(sequence.outputs) + sequence.num_pending
            if num_outputs >= sequence.limits.max_tokens:
                continue  # its last token is on the way
            num_left = len(sequence.prompt) + num_outputs - sequence.num_computed
            if num_stages > 1 and (
                sequence.next_step > self._step
                or (num_left == 1 and len(draft.decodes) >= most_decodes)
            ):
                continue  # its newest token is on its way to the first stage, or others decode now
            length = 1
            if num_left > 1:
                # One token is kept for each sequence behind: no prompt holds up their decoding.
                budget = draft.budget - (len(self._running) - index - 1)
                start = sequence.num_computed
                length = self._chunk_length(draft, sequence, num_left, budget, start)
            end = sequence.num_computed + length
            if end <= sequence.horizon or self._reach(draft, sequence, end):
                self._add_row(draft, sequence, length, samples=length == num_left)
        return self.num_preemptions > num_preemptions

    def _schedule_waiting(self, draft: Draft) -> None:
        """Admit from the front of the line until one does not fit; nobody overtakes it."""
        while self._free_slots and draft.budget and (sequence := self._next(draft)):
            if not self._admit(draft, sequence):
                return

    def _next(self, draft: Draft) -> Sequence | None:
        """The first in line, of those whose lane has room in this step."""
        if draft.long is None or self._lanes is None:
            return self._waiting.first
        lines = []
        if draft.budget > draft.long.reserved:
            lines.append(self._waiting.short)
        others = draft.long.num_running > 0
        has_slots = len(self._free_slots) > RESERVE * self.config.max_num_seqs * others
        if has_slots and draft.long.num_prompts < self._lanes.most_long:
            lines.append(self._waiting.long)
        return self._waiting.first_of(*lines)

    def _is_long(self, sequence: Sequence) -> bool:
        """Whether much of a new prompt is to be computed; of a fork its parent has computed it."""
        if self._lanes is None or sequence.parent is not None:
            return False
        if not self.would_be_long(len(sequence.prompt)):
            return False
        num_cached = self._tables.cached_prefix(sequence).num_tokens
        return self.would_be_long(len(sequence.prompt) - num_cached)

    def _chunk_length(
        self, draft: Draft, sequence: Sequence, num_left: int, budget: int, start: int
    ) -> int:
        """How many of a sequence's `num_left` tokens from `start` on to compute now.

        0 if that must wait.
        """
        if not self.config.enable_chunked_prefill:
            return num_left if num_left <= budget else 0
        most = min(num_left, budget, self.config.long_prefill_token_threshold or num_left)
        if draft.long is None:
            return most
        if sequence.is_long:
            return draft.long.chunk(most, start)
        return min(most, max(budget - draft.long.reserved, 1))

    def _reach(self, draft: Draft, sequence: Sequence, end: int) -> bool:
        """Let a running sequence's tables reach `end`, at the cost of the last in line if need be.

        Returns False if that is the sequence itself.
        """
        missing = self._tables.missing(sequence, end)
        while not self.pool.can_allocate(sum(missing)):
            victim = self._running.last
            assert victim is not None, "a running sequence is in line"
            self._preempt(victim)
            if victim is sequence:
                return False
        self._tables.grow(draft, sequence, missing, end)
        return True

    def _admit(self, draft: Draft, sequence: Sequence) -> bool:
        """Give the sequence a slot and pages for its known tokens, if that leaves some over."""
        if sequence.num_pending:
            return False  # preempted, and its newest tokens are still on the way
        prefix: Prefix | None = self._find_prefix(draft, sequence)
        while prefix and not self._has_room(draft, sequence, prefix):
            prefix = prefix.instead
        if prefix is None:
            return False
        num_left = sequence.num_tokens - prefix.num_tokens
        if not sequence.is_long and self.would_be_long(num_left):
            self._make_long(sequence)
            return True
        length = self._chunk_length(draft, sequence, num_left, draft.budget, prefix.num_tokens)
        if not length:
            return False
        self._waiting.remove(sequence)
        self._running.add(sequence)
        self._start(sequence, prefix)
        draft.admitted.append(sequence)
        self._tables.start(draft, sequence, prefix, length)
        self._add_row(draft, sequence, length, samples=length == num_left)
        if draft.long is not None and sequence.is_long:
            draft.long.num_running += 1
            draft.long.num_prompts += num_left > 1
        return True

    def _make_long(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the other lane: what it was to find in the cache is gone."""
        self._waiting.remove(sequence)
        num_left = sequence.backlog
        self._count_backlog(sequence, 0)
        sequence.is_long = True
        self._count_backlog(sequence, num_left)
        self._waiting.add(sequence)

    def _count_backlog(self, sequence: Sequence, num_tokens: int) -> None:
        """So many of its prompt tokens are yet to be computed."""
        self.backlog[sequence.is_long] += num_tokens - sequence.backlog
        sequence.backlog = num_tokens

    def _has_room(self, draft: Draft, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether there are pages for its known tokens, and some to spare for those that run."""
        num_spare = len(self._running) * self.config.growth_steps // self.pool.page_size
        num_pages = self._tables.num_own(sequence, prefix) + num_spare * len(self.config.windows)
        if draft.long is not None and sequence.is_long and draft.long.num_running:
            num_pages += int(RESERVE * self.pool.num_pages)
        return self.pool.can_allocate(num_pages, prefix.shared + prefix.copied)

    def _start(self, sequence: Sequence, prefix: Prefix) -> None:
        sequence.status = Status.RUNNING
        sequence.slot = self._free_slots.pop()
        if sequence.num_cached < 0:
            sequence.num_cached = prefix.num_tokens
            if self.pool.enable_prefix_caching and sequence.reads_prefix_cache:
                self._count_hits(len(sequence.prompt), prefix)

    def _count_hits(self, num_tokens: int, prefix: Prefix) -> None:
        num_in_pages = prefix.num_tokens - prefix.num_from_host
        self.prefix_queries += num_tokens
        self.prefix_hits += num_in_pages
        if self.pool.host.num_pages:
            self.host_queries += num_tokens - num_in_pages
            self.host_hits += prefix.num_from_host

    def _find_prefix(self, draft: Draft, sequence: Sequence) -> Prefix:
        """The tokens that need not be computed: all but at least one, whose logits are wanted."""
        if not sequence.reads_prefix_cache:
            return self._tables.no_prefix()
        parent = sequence.parent
        if parent and sequence.status is Status.WAITING and self._has_prompt(draft, parent):
            prefix = self._tables.forked_prefix(sequence, parent)
            if prefix is not None:
                return prefix
        return self._tables.cached_prefix(sequence)

    def _has_prompt(self, draft: Draft, parent: Sequence) -> bool:
        """Whether earlier steps wrote the parent's prompt: a step copies pages before it writes.

        One that comes back in this step after a preemption may have a page copied itself.
        """
        running = parent.status is Status.RUNNING and parent.num_computed >= len(parent.prompt)
        return running and parent not in draft.admitted and not draft.prefills(parent)

    def _add_row(self, draft: Draft, sequence: Sequence, length: int, samples: bool) -> None:
        """Let the sequence advance by `length` tokens, which its pages have room for."""
        assert sequence.slot is not None, "only a running sequence advances"
        row = Row(sequence, sequence.slot, sequence.num_computed, length, samples)
        (draft.decodes if length == 1 else draft.chunks).append(row)
        draft.budget -= length
        sequence.num_computed += length
        sequence.num_pending += samples
        if samples:
            sequence.next_step = self._step + self.config.num_stages
        if sequence.backlog:
            self._count_backlog(sequence, max(len(sequence.prompt) - sequence.num_computed, 0))
        if sequence.num_computed % self.pool.page_size < length:  # a page has become full
            self._tables.register(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages and slot. What steps in flight sample for it counts."""
        self._leave(sequence)
        sequence.status = Status.PREEMPTED
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._count_backlog(sequence, len(sequence.prompt))
        self._waiting.add(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.num_pending = 0
        self._count_backlog(sequence, 0)
        del self._sequences[sequence.sequence_id]
        self._waiting.release_forks(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones: its pages and its slot are free at once."""
        assert sequence.slot is not None, "only a running sequence has a slot"
        self._running.remove(sequence)
        self._tables.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = None


def _finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    """Why the newest token ends the sequence, if it does."""
    limits, length = sequence.limits, len(sequence.outputs)
    if token in limits.stop_token_ids and length >= limits.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= limits.max_tokens else None
