"""The engine core: token ids in, token ids out.

One thread drives it: `add` and `abort` between steps, `step` over and over while there is work.
Each `step` schedules and enqueues the next step first and reads the one before it then, so that the
device never waits for the host.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from paged.models.loading import ModelSource
from paged.pool import PagePool
from paged.runtime.compiles import num_compiles
from paged.runtime.config import EngineConfig
from paged.runtime.engine import load_tokenizer
from paged.runtime.errors import EngineDead, InvalidRequest
from paged.runtime.guides import Compiled, Grammars, Guide
from paged.runtime.messages import Candidates, EngineRequest, EngineStats, SequenceOutput
from paged.runtime.plan import StepPlan, TokenEvent
from paged.runtime.runner import InFlight, SlotRequest, StepResult
from paged.runtime.sampler import TokenLogprobs
from paged.runtime.scheduler import Scheduler
from paged.runtime.sequence import FinishReason, Sequence, SequenceLimits
from paged.runtime.setup import prepare

logger = logging.getLogger(__name__)

# Seconds that a step waits for grammars when there is nothing else to do.
_PATIENCE = 0.002


@dataclass(eq=False)
class _Request:
    """A live request and its sequences that have not ended.

    Attributes:
        prompt_scores: log-probabilities of prompt positions 1 onwards, as far as computed; None
            if not asked for or already handed out.
    """

    request: EngineRequest
    sequences: dict[int, Sequence] = field(default_factory=dict)
    first_scheduled: float | None = None
    prompt_scores: list[Candidates] | None = None


@dataclass(frozen=True)
class _Owner:
    """Whose sequence it is: its request, its index there, and its own 64-bit seed.

    Attributes:
        says_more: whether its news hold more than tokens.
        guide: where it is in its grammar; None if it is free.
    """

    live: _Request
    index: int
    seed: int
    says_more: bool
    guide: Guide | None


class _Scores(NamedTuple):
    """What news say beside tokens; entries as in `SequenceOutput`."""

    logprobs: list[Candidates] | None
    prompt_logprobs: list[Candidates] | None


_NONE = _Scores(None, None)


class EngineCore:
    """Scheduler and device behind four calls: add, abort, step, close.

    Attributes:
        max_model_len: longest sequence, prompt and output.
        vocab_size: token ids are below it.
    """

    def __init__(self, config: EngineConfig, source: ModelSource, *, progress: bool = True) -> None:
        """Load, divide memory, compile. Raises ConfigError where flags do not fit."""
        self._runner, scheduling, self.memory = prepare(config, source, progress=progress)
        self.max_model_len = scheduling.max_model_len
        self.vocab_size = source.config.vocab_size
        self._pool = PagePool(
            self.memory.num_pages, self.memory.page_size, config.enable_prefix_caching
        )
        self._scheduler = Scheduler(scheduling, self._pool)
        self._eos = source.eos_token_ids
        self._seeds = random.Random(config.seed)
        self._requests: dict[str, _Request] = {}
        self._owner: dict[Sequence, _Owner] = {}
        self._in_flight: deque[InFlight] = deque()
        self._grammars = Grammars(
            partial(load_tokenizer, config, source), self.vocab_size, self._eos
        )
        self._compiling: list[tuple[_Request, Compiled]] = []
        self._num_guided = 0
        self._num_sequences = self._num_steps = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._cause_of_death: str | None = None
        # The collector walks everything only when a quarter more has survived than the last time.
        # Not having walked what start-up made, it would soon, for half a second without a step.
        gc.collect()
        self._compiles_at_start = num_compiles()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight or self._compiling)

    def fileno(self) -> None:
        """No other process has news for `step`."""

    def add(self, request: EngineRequest) -> None:
        """Queue a validated request.

        Raises:
            InvalidRequest: a live request has its id.
            EngineDead: see `step`.
        """
        self._check_alive()
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use by a running request", "request_id"
            )
        params = request.params
        assert params.max_tokens is not None, "the front sets max_tokens"
        stops = frozenset(params.stop_token_ids or ())
        # Where a grammar can but end, it does, whatever else was asked for.
        guided = bool(request.grammar)
        eos = frozenset() if params.ignore_eos and not guided else self._eos
        min_tokens = 0 if guided else params.min_tokens
        limits = SequenceLimits(params.max_tokens, min_tokens, stops | eos, eos - stops)
        compiled = self._grammars.compile(request.grammar) if guided else None
        scores: list[Candidates] | None = None if params.prompt_logprobs is None else []
        live = _Request(request, prompt_scores=scores)
        for index in range(params.n):
            sequence = Sequence(
                sequence_id=self._num_sequences,
                prompt=request.prompt_token_ids,
                limits=limits,
                priority=request.priority,
                arrival=request.arrival_time,
                cache_salt=request.cache_salt,
                reads_prefix_cache=index > 0 or params.prompt_logprobs is None,
                parent=live.sequences[0] if index else None,
            )
            if compiled is None:
                self._scheduler.add(sequence)
            self._num_sequences += 1
            live.sequences[index] = sequence
            seed = self._seeds.getrandbits(64) if params.seed is None else params.seed + index
            says_more = params.logprobs is not None or (index == 0 and scores is not None)
            guide = None if compiled is None else Guide(compiled)
            self._owner[sequence] = _Owner(live, index, seed, says_more, guide)
        self._requests[request.request_id] = live
        if compiled is not None:
            self._compiling.append((live, compiled))
            self._num_guided += params.n

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """End a request, or one of its sequences. An id that is not live is ignored."""
        live = self._requests.get(request_id)
        if live is None:
            return []
        wanted = [
            (i, sequence) for i, sequence in live.sequences.items() if index is None or i == index
        ]
        self._scheduler.abort([sequence.sequence_id for _, sequence in wanted])
        for _, sequence in wanted:
            self._forget(sequence)
        return [_ending(live, i, "abort") for i, _ in wanted]

    def step(self) -> list[SequenceOutput]:
        """Enqueue the next step, then read the one before it.

        If the device fails, every live sequence ends with finish reason "error", and each later
        call raises EngineDead.
        """
        self._check_alive()
        news: list[SequenceOutput] = []
        try:
            if self._compiling:
                news += self._queue_compiled()
            plan = self._scheduler.schedule()
            if plan is not None:
                self._launch(plan, news)
            if self._in_flight and (plan is None or len(self._in_flight) > 1):
                news += self._read(self._in_flight.popleft())
            return news
        except Exception as error:
            return [*news, *self._die(error)]

    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._pool
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._num_compiling,
            kv_cache_usage=scheduler.kv_usage,
            num_pages=self.memory.num_pages - 1,
            num_free_pages=pool.num_free,
            num_cached_pages=pool.num_cached,
            page_size=self.memory.page_size,
            kv_waste=scheduler.kv_waste,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            compiles_after_warmup=num_compiles() - self._compiles_at_start,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False, and nothing done, while sequences use pages."""
        return self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        """End everything and give the device's memory back. Idempotent."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._in_flight.clear()
        self._cause_of_death = self._cause_of_death or "the engine was closed"
        self._grammars.close()
        self._runner.close()

    @property
    def _num_compiling(self) -> int:
        return sum(len(live.sequences) for live, _ in self._compiling)

    def _queue_compiled(self) -> list[SequenceOutput]:
        """Queue the requests whose grammars are there; end those whose grammar cannot be."""
        idle = not (self._scheduler.has_work or self._in_flight)
        futures = [compiled for _, compiled in self._compiling]
        wait(futures, _PATIENCE if idle else 0, FIRST_COMPLETED)
        done = [each for each in self._compiling if each[1].done()]
        self._compiling = [each for each in self._compiling if each not in done]
        ended: list[SequenceOutput] = []
        for live, compiled in done:
            failure = compiled.exception()
            for index, sequence in list(live.sequences.items()):
                if failure is None:
                    self._scheduler.add(sequence)
                else:
                    self._forget(sequence)
                    ended.append(_ending(live, index, "abort", str(failure)))
        return ended

    def _launch(self, plan: StepPlan, news: list[SequenceOutput]) -> None:
        """Enqueue a step; what is read for its sake goes to the news."""
        now = time.time()
        for sequence in plan.admitted:
            owner = self._owner[sequence]
            owner.live.first_scheduled = owner.live.first_scheduled or now
            params, stops = owner.live.request.params, sequence.limits.stop_token_ids
            guided = owner.guide is not None
            self._runner.admit(sequence, SlotRequest(params, owner.seed, stops, guided))
        if self._num_guided and self._guided_rows(plan):
            self._in_flight.append(self._launch_guided(plan, news))
        else:
            self._in_flight.append(self._runner.launch(plan))
        self._num_steps += 1
        for row in plan.rows:
            if (num_left := len(row.sequence.prompt) - row.start) > 0:
                self._prompt_tokens += min(row.length, num_left)

    def _launch_guided(self, plan: StepPlan, news: list[SequenceOutput]) -> InFlight:
        """Enqueue a step with rows whose grammars say what may come next.

        That takes their last tokens, so the step before is read first. Meanwhile the device runs
        this one: only the choice of its tokens waits.
        """
        started = self._runner.start(plan)
        while self._in_flight:
            news += self._read(self._in_flight.popleft())
        if rows := self._guided_rows(plan):  # those that have not ended just now
            slots, guides = zip(*rows, strict=True)
            self._runner.load_masks(list(slots), self._grammars.masks(guides))
        return self._runner.finish(started)

    def _guided_rows(self, plan: StepPlan) -> list[tuple[int, Guide]]:
        """Slots and guides of the rows that a grammar says the next token of."""
        rows = []
        for row in plan.rows:
            owner = self._owner.get(row.sequence) if row.samples else None
            if owner is not None and owner.guide is not None:
                rows.append((row.slot, owner.guide))
        return rows

    def _read(self, step: InFlight) -> list[SequenceOutput]:
        result = step.read()
        now = time.monotonic()
        if result.prompt_logprobs is not None:
            self._keep_prompt_scores(step.plan, result.prompt_logprobs)
        events = self._scheduler.update(step.plan, result.tokens.tolist())
        self._generation_tokens += len(events)
        return [self._news(event, result, now) for event in events]

    def _news(self, event: TokenEvent, result: StepResult, now: float) -> SequenceOutput:
        sequence, reason = event.sequence, event.finish_reason
        owner = self._owner[sequence]
        live = owner.live
        logprobs, prompt_logprobs = self._scores(owner, event, result) if owner.says_more else _NONE
        if reason is not None:
            self._forget(sequence)
        news = SequenceOutput(
            request_id=live.request.request_id,
            index=owner.index,
            token_ids=[event.token],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=None if reason is None else reason.value,
            stop_reason=sequence.stop_reason,
            num_cached_tokens=sequence.num_cached,
            first_scheduled_time=live.first_scheduled,
            read_time=now,
        )
        return news if owner.guide is None else self._guided(owner.guide, event, news)

    def _guided(self, guide: Guide, event: TokenEvent, news: SequenceOutput) -> SequenceOutput:
        """The news, telling the sequence's end if its grammar is complete with the token."""
        if event.finish_reason is FinishReason.STOP:
            return news  # by a stop token, which is no part of the text
        guide.advance(event.token)
        if not guide.is_complete:
            return news
        error = guide.error
        if event.finish_reason is None:
            reason = FinishReason.ABORT if error else FinishReason.STOP
            self._scheduler.finish([event.sequence.sequence_id], reason)
            self._forget(event.sequence)
        if error:
            return replace(news, finish_reason="abort", error=error)
        return replace(news, finish_reason="stop", ended_by_text=True)

    def _scores(self, owner: _Owner, event: TokenEvent, result: StepResult) -> _Scores:
        """Log-probabilities of the new token and, once, of the prompt, as far as asked for."""
        live, params = owner.live, owner.live.request.params
        logprobs, prompt_logprobs = None, None
        if params.logprobs is not None:
            assert result.logprobs is not None, "a step samples as its most demanding row asks"
            logprobs = [_candidates(result.logprobs, event.row, event.token, params.logprobs)]
        if owner.index == 0:
            prompt_logprobs, live.prompt_scores = live.prompt_scores, None
        return _Scores(logprobs, prompt_logprobs)

    def _keep_prompt_scores(self, plan: StepPlan, scores: TokenLogprobs) -> None:
        """File the step's prompt log-probabilities; a preempted prompt starts over."""
        begin = 0
        for row in plan.rows:
            owner = self._owner.get(row.sequence)
            live = owner.live if owner and owner.index == 0 else None
            if live is not None and live.prompt_scores is not None:
                top = live.request.params.prompt_logprobs or 0
                prompt = row.sequence.prompt
                following = prompt[row.start + 1 : row.start + 1 + row.length]
                del live.prompt_scores[row.start :]
                live.prompt_scores += [
                    _candidates(scores, begin + i, token, top) for i, token in enumerate(following)
                ]
            begin += row.length

    def _forget(self, sequence: Sequence) -> None:
        owner = self._owner.pop(sequence)
        self._num_guided -= owner.guide is not None
        del owner.live.sequences[owner.index]
        if not owner.live.sequences:
            del self._requests[owner.live.request.request_id]

    def _check_alive(self) -> None:
        if self._cause_of_death is not None:
            raise EngineDead(self._cause_of_death)

    def _die(self, error: Exception) -> list[SequenceOutput]:
        cause = f"{type(error).__name__}: {error}"
        logger.exception("The engine stopped after an error in a step")
        self._cause_of_death = f"the engine stopped after an error in a step: {cause}"
        ended = [
            _ending(owner.live, owner.index, "error", self._cause_of_death)
            for owner in self._owner.values()
        ]
        self._scheduler.fail_all()
        self._owner.clear()
        self._requests.clear()
        self._in_flight.clear()
        self._compiling.clear()
        self._num_guided = 0
        return ended


def _ending(live: _Request, index: int, reason: str, error: str | None = None) -> SequenceOutput:
    return SequenceOutput(
        request_id=live.request.request_id,
        index=index,
        token_ids=[],
        finish_reason=reason,
        error=error,
        first_scheduled_time=live.first_scheduled,
    )


def _candidates(scores: TokenLogprobs, position: int, token: int, top: int) -> Candidates:
    return Candidates(
        token=token,
        logprob=float(scores.logprob[position]),
        rank=int(scores.rank[position]),
        top_tokens=scores.top_token[position, :top].tolist(),
        top_logprobs=scores.top_logprob[position, :top].tolist(),
    )
