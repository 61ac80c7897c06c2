"""The engine core: token ids in, token ids out.

One thread drives it: `add` and `abort` between steps, `step` over and over while there is work.
Each `step` schedules and enqueues the next step first and reads the one before it then, so that the
device never waits for the host; with a device in stages, the one as many steps before.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial

from paged.models.loading import ModelSource
from paged.pool import PagePool
from paged.runtime.about import StartClock
from paged.runtime.bans import bans_of
from paged.runtime.compiles import num_compiles
from paged.runtime.config import EngineConfig
from paged.runtime.disk_pages import Fetched
from paged.runtime.engine import load_tokenizer
from paged.runtime.engine_state import EngineState, ProcessState, StepState
from paged.runtime.errors import EngineDead, InvalidRequest
from paged.runtime.gate import Deadlines, Gate, Queue
from paged.runtime.guided_steps import end_of, guided_rows, stuck_rows, with_end
from paged.runtime.guides import Grammars, Guide
from paged.runtime.live_requests import (
    LiveRequest,
    Owner,
    Preparing,
    ending,
    limits_of,
    refused,
    sequence_states,
)
from paged.runtime.messages import (
    NO_NUMBERS,
    EngineRequest,
    EngineStats,
    Saving,
    SequenceOutput,
)
from paged.runtime.pace import Pace
from paged.runtime.plan import StepPlan, TokenEvent
from paged.runtime.runner import InFlight, SlotRequest, StepResult
from paged.runtime.scheduler import Scheduler
from paged.runtime.scores import keep_prompt_scores, scores_of
from paged.runtime.sequence import FinishReason, Sequence, SequenceLimits
from paged.runtime.setup import open_disk_tier, prepare, within_memory
from paged.runtime.step_device import Device, alone
from paged.runtime.step_record import StepRecord
from paged.runtime.transfer.asking import RemotePrefills
from paged.runtime.transfer.door import check_port
from paged.runtime.transfer.peer import Handover
from paged.runtime.transfer.serving import ServedPrefills
from paged.runtime.transfer.stats import transfer_stats

logger = logging.getLogger(__name__)

# Seconds that a step waits for grammars when there is nothing else to do.
_PATIENCE = 0.002


class EngineCore:
    """Scheduler and device behind four calls: add, abort, step, close.

    Attributes:
        memory: bytes by purpose.
        startup: seconds by phase.
        max_model_len: longest sequence, prompt and output.
        vocab_size: token ids are below it.
        remote, served: prompts that others compute for this engine, and this one for others.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        lead: Callable[[Device], Device] = alone,
        *,
        progress: bool = True,
    ) -> None:
        """Load, divide memory, compile. For `lead` and what is raised see `prepare`."""
        clock = StartClock()
        check_port(config)
        prepared = prepare(config, source, clock, lead, progress=progress)
        self._runner, scheduling, self.memory = prepared
        self.startup = clock.seconds
        self.max_model_len = scheduling.max_model_len
        self.vocab_size = source.config.vocab_size
        self._pool = PagePool(
            self.memory.num_pages,
            self.memory.page_size,
            config.enable_prefix_caching,
            self.memory.num_host_pages,
        )
        self._scheduler = Scheduler(scheduling, self._pool)
        with within_memory(config):  # the fingerprint of weights takes some
            self._disk = open_disk_tier(config, self._runner, self._pool, scheduling)
            self.served = ServedPrefills.of(config, self._runner, scheduling, self.vocab_size)
            self.remote = RemotePrefills.of(config, self._runner, self._pool, scheduling)
        self._eos = source.eos_token_ids
        self._seeds = random.Random(config.seed)
        self._requests: dict[str, LiveRequest] = {}
        self._owner: dict[Sequence, Owner] = {}
        self._in_flight: deque[InFlight] = deque()
        self._num_stages = scheduling.num_stages
        self._grammars = Grammars(
            partial(load_tokenizer, config, source), self.vocab_size, self._eos
        )
        self._preparing: list[Preparing] = []
        self._gate = Gate(config.max_waiting, config.max_waiting_tokens)
        self._refused: list[SequenceOutput] = []  # news for the next step
        self._deadlines = Deadlines()
        self._num_timeouts = 0
        self._pace = Pace(self._scheduler, self._gate)
        self._num_guided = 0
        self._num_sequences = self._num_steps = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._admitted_tokens = self._cached_tokens = 0
        self._record = StepRecord()
        self._cause_of_death: str | None = None
        # The collector walks everything only when a quarter more has survived than the last time.
        # Not having walked what start-up made, it would soon, for half a second without a step.
        gc.collect()
        self._compiles_at_start = num_compiles()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, be it to say that the core has died."""
        waits = bool(self._in_flight or self._preparing or self._refused)
        is_dead = self._cause_of_death is not None
        return self._scheduler.has_work or waits or self.served.has_news or is_dead

    def fileno(self) -> int | None:
        """What is readable while decode engines have news for `step`."""
        return self.served.fileno()

    def add(self, request: EngineRequest) -> None:
        """Queue a validated request, or have the next step say that it is not taken.

        Raises:
            InvalidRequest: a live request has its id.
            EngineDead: see `step`.
        """
        self._check_alive()
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use by a running request", "request_id"
            )
        if (refusal := self._gate.refusal(request, self._queue())) is not None:
            self._refused += refused(request, refusal)
            return
        compiled = self._grammars.compile(request.grammar) if request.grammar else None
        fetched = self._fetch(request)
        handover = self._ask(request) if fetched is None else None
        is_ready = compiled is None and fetched is None and handover is None
        limits, bans = limits_of(request, self._eos), bans_of(request, self.vocab_size)
        live = LiveRequest.of(request)
        for index in range(request.params.n):
            guide = Guide(compiled, bans) if compiled or bans else None
            sequence = self._begin(live, index, limits, guide)
            if is_ready:
                self._scheduler.add(sequence)
        self._requests[request.request_id] = live
        self._deadlines.add(request)
        if not is_ready:
            self._preparing.append(Preparing(live, compiled, fetched, handover))

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """End a request, or one of its sequences. An id that is not live is ignored."""
        live = self._requests.get(request_id)
        if live is None:
            return []
        wanted = [i for i in live.sequences if index is None or i == index]
        return self._end(live, wanted, FinishReason.ABORT)

    def step(self) -> list[SequenceOutput]:
        """Enqueue the next step, then read the one before it.

        If the device fails, every live sequence ends with finish reason "error", and each later
        call raises EngineDead.
        """
        self._check_alive()
        self._record.begin()
        self.served.hear(self.add, self.abort)
        news, self._refused = self._refused, []
        try:
            news += self._end_late()
            if self._preparing:
                news += self._queue_prepared()
            plan = self._scheduler.schedule()
            if plan is not None:
                self._launch(plan, news)
            else:
                self._runner.drain()
            if self._in_flight and (plan is None or len(self._in_flight) > self._num_stages):
                news += self._read(self._in_flight.popleft())
            self._record.end()
            return self.served.without(news)
        except Exception as error:
            return self.served.without([*news, *self._die(error)])

    def stats(self) -> EngineStats:
        scheduler, pool, disk, queue = self._scheduler, self._pool, self._disk, self._queue()
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._num_preparing,
            num_deferred=self._num_preparing,
            kv_cache_usage=scheduler.kv_usage,
            num_pages=self.memory.num_pages - 1,
            num_free_pages=pool.num_free,
            num_cached_pages=pool.num_cached,
            page_size=self.memory.page_size,
            kv_waste=scheduler.kv_waste,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_admitted=self._admitted_tokens,
            prompt_tokens_cached=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            host_queries=scheduler.host_queries,
            host_hits=scheduler.host_hits,
            num_host_pages=pool.host.num_pages,
            num_used_host_pages=pool.host.num_used,
            host_bytes_saved=pool.num_saved * self.memory.bytes_per_host_page,
            host_bytes_loaded=pool.num_loaded * self.memory.bytes_per_host_page,
            num_disk_pages=len(disk.files) if disk else 0,
            disk_pages_read=disk.files.num_read if disk else 0,
            disk_pages_left_out=disk.files.num_left_out if disk else 0,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            compiles_after_warmup=num_compiles() - self._compiles_at_start,
            bytes_per_page=self.memory.bytes_per_page,
            steps=self._record.stats(),
            room=self._gate.room(queue),
            retry_after=self._gate.retry_after(queue),
            wait_seconds=self._gate.wait(queue),
            long_wait_seconds=self._gate.wait(queue, is_long=True),
            waiting_tokens=sum(queue.backlog),
            num_running_long=scheduler.num_running_long,
            num_waiting_long=scheduler.num_waiting_long,
            refused=dict(self._gate.refused),
            num_timeouts=self._num_timeouts,
            transfer=transfer_stats(self.remote, self.served, self.memory.bytes_per_host_page),
        )

    def look(self, deliver: Callable[[EngineState], None]) -> None:
        """Have a close look at the engine delivered, at once."""
        steps = [
            StepState(each.bucket.name, len(each.plan.rows), each.plan.num_tokens, each.age)
            for each in self._in_flight
        ]
        sequences = sequence_states(self._scheduler.in_order(), self._preparing, self._owner)
        deliver(EngineState(sequences, self._pool.states(), steps, ProcessState.here()))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages, wherever they are; False, and nothing done, while any is used.

        Those count that are being read from disk, or handed over.
        """
        if (
            any(each.fetched or each.handover for each in self._preparing)
            or not self._scheduler.reset_prefix_cache()
        ):
            return False
        if self._disk is not None:
            self._disk.files.clear()
        return True

    def kill(self, reason: str) -> None:
        """Nothing: a thread cannot be ended from outside."""

    def close(self) -> None:
        """End everything and give the device's memory back. Idempotent."""
        for _ in self.closing():
            pass

    def closing(self) -> Iterator[Saving]:
        """Close, and say meanwhile how far pages have been written to disk."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._in_flight.clear()
        self.served.close()
        self.remote.close()
        if self._disk is not None:
            yield from self._disk.closing(saves_device=self._cause_of_death is None)
        self._cause_of_death = self._cause_of_death or "the engine was closed"
        self._grammars.close()
        self._runner.close()

    def _queue(self) -> Queue:
        waiting = [each.live.request for each in self._preparing if each.live.sequences]
        return Queue.of(self._scheduler, waiting)

    def _end(
        self, live: LiveRequest, indices: Iterable[int], reason: FinishReason
    ) -> list[SequenceOutput]:
        """End sequences of a live request for a reason found outside the scheduler."""
        ended = [(index, live.sequences[index]) for index in indices]
        self._scheduler.finish([sequence.sequence_id for _, sequence in ended], reason)
        for _, sequence in ended:
            self._forget(sequence)
        # Pages that are on their way for it are taken in all the same.
        self._preparing = [
            each for each in self._preparing if each.live.sequences or each.fetched or each.handover
        ]
        return [ending(live, index, reason.value) for index, _ in ended]

    def _end_late(self) -> list[SequenceOutput]:
        """End the requests whose deadlines have passed: their pages are free at once."""
        news, now = [], time.monotonic()
        for request_id in self._deadlines.passed(now):
            live = self._requests.get(request_id)
            if live is not None and 0 < live.request.terms.deadline <= now:
                news += self._end(live, list(live.sequences), FinishReason.TIMEOUT)
                self._num_timeouts += 1
        return news

    def _fetch(self, request: EngineRequest) -> Fetched | None:
        """Begin to read of its prompt what is on disk alone, unless all of it is to be scored."""
        if self._disk is None or request.params.prompt_logprobs is not None:
            return None
        return self._disk.fetch(request.prompt_token_ids, request.cache_salt)

    def _ask(self, request: EngineRequest) -> Handover | None:
        """Have a prefill engine compute what is not here, unless one asks this engine for it."""
        return None if request.request_id in self.served else self.remote.ask(request)

    def _begin(
        self, live: LiveRequest, index: int, limits: SequenceLimits, guide: Guide | None
    ) -> Sequence:
        """A new sequence of a request, not queued yet."""
        request, params = live.request, live.request.params
        sequence = live.sequences[index] = Sequence(
            sequence_id=self._num_sequences,
            prompt=request.prompt_token_ids,
            limits=limits,
            priority=request.priority,
            arrival=request.arrival_time,
            cache_salt=request.cache_salt,
            reads_prefix_cache=index > 0 or params.prompt_logprobs is None,
            parent=live.sequences[0] if index else None,
        )
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed + index
        scores_prompt = index == 0 and params.prompt_logprobs is not None
        says_more = params.logprobs is not None or scores_prompt
        self._owner[sequence] = Owner(live, index, seed, says_more, guide)
        self._num_sequences += 1
        self._num_guided += guide is not None
        return sequence

    @property
    def _num_preparing(self) -> int:
        return sum(len(each.live.sequences) for each in self._preparing)

    def _queue_prepared(self) -> list[SequenceOutput]:
        """Queue the requests that have what they waited for; end those whose grammar cannot be."""
        for each in self._preparing:
            if each.handover is not None:
                self.remote.see_to(each.handover, is_wanted=bool(each.live.sequences))
        idle = not (self._scheduler.has_work or self._in_flight)
        missing = [future for each in self._preparing for future in each.missing]
        wait(missing, _PATIENCE if idle else 0, FIRST_COMPLETED)
        done = [each for each in self._preparing if not each.missing]
        self._preparing = [each for each in self._preparing if each not in done]
        ended: list[SequenceOutput] = []
        for live, compiled, fetched, handover in done:
            if handover is not None:
                self.remote.settle(handover)
            elif fetched is not None and self._disk is not None:
                self._disk.take_in(fetched.result())
                if live.sequences and (handover := self._ask(live.request)) is not None:
                    self._preparing.append(Preparing(live, compiled, None, handover))
                    continue
            failure = None if compiled is None else compiled.exception()
            for index, sequence in list(live.sequences.items()):
                if failure is None:
                    self._scheduler.add(sequence)
                else:
                    self._forget(sequence)
                    ended.append(ending(live, index, "abort", str(failure)))
        return ended

    def _launch(self, plan: StepPlan, news: list[SequenceOutput]) -> None:
        """Enqueue a step; what is read for its sake goes to the news."""
        now = time.time()
        if not self._in_flight:
            self._pace.begin()
        for sequence in plan.admitted:
            owner = self._owner[sequence]
            owner.live.first_scheduled = owner.live.first_scheduled or now
            params, stops = owner.live.request.params, sequence.limits.stop_token_ids
            guided = owner.guide is not None
            if not sequence.num_preemptions:
                self._admitted_tokens += len(sequence.prompt)
                self._cached_tokens += sequence.num_cached
            self._runner.admit(sequence, SlotRequest(params, owner.seed, stops, guided))
        if self._num_guided and guided_rows(plan, self._owner):
            self._in_flight.append(self._launch_guided(plan, news))
        else:
            self._in_flight.append(self._runner.launch(plan))
        self._record.launched(self._in_flight[-1])
        self.served.launched(plan, self._owner)
        self._num_steps += 1
        for row in plan.rows:
            if (num_left := len(row.sequence.prompt) - row.start) > 0:
                self._prompt_tokens += min(row.length, num_left)

    def _launch_guided(self, plan: StepPlan, news: list[SequenceOutput]) -> InFlight:
        """Enqueue a step with rows whose grammars say what may come next.

        That takes their last tokens, so the step before is read first. Meanwhile the device runs
        this one: only the choice of its tokens waits. (All of it, where the device is in stages: a
        step that has begun moves on with those before it.)
        """
        if self._num_stages > 1:
            news += self._read_all()
        started = self._runner.start(plan)
        news += self._read_all()
        if rows := guided_rows(plan, self._owner):  # those that have not ended just now
            masks = self._grammars.masks([each.guide for each in rows])
            for (row, owner, _), end in stuck_rows(rows, masks):  # what is chosen there is dropped
                self._end_early(row.sequence, end.reason)
                news.append(ending(owner.live, owner.index, end.reason.value, end.error))
            self._runner.load_masks([each.row.slot for each in rows], masks)
        return self._runner.finish(started)

    def _end_early(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence for what its grammar says."""
        self._scheduler.finish([sequence.sequence_id], reason)
        self._forget(sequence)

    def _read_all(self) -> list[SequenceOutput]:
        news: list[SequenceOutput] = []
        if self._in_flight:
            self._runner.drain()
        while self._in_flight:
            news += self._read(self._in_flight.popleft())
        return news

    def _read(self, step: InFlight) -> list[SequenceOutput]:
        result = self._record.read(step)
        now = time.monotonic()
        self._pace.take(step.plan, now)
        if result.prompt_logprobs is not None:
            keep_prompt_scores(step.plan, result.prompt_logprobs, self._owner)
        events = self._scheduler.update(step.plan, result.tokens.tolist())
        self._generation_tokens += len(events)
        return [self._news(event, result, now) for event in events]

    def _news(self, event: TokenEvent, result: StepResult, now: float) -> SequenceOutput:
        sequence, reason = event.sequence, event.finish_reason
        owner = self._owner[sequence]
        live = owner.live
        if event.token < 0:
            self._forget(sequence)
            logger.error("%s ends alone: %s", live.request.request_id, NO_NUMBERS)
            return ending(live, owner.index, "abort", NO_NUMBERS)
        logprobs, prompt_logprobs = scores_of(owner, event, result)
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
        end = None if owner.guide is None else end_of(owner.guide, event)
        if end is None:
            return news
        if reason is None:
            self._end_early(sequence, end.reason)
        return with_end(news, end)

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
        logger.exception("The engine stopped after an error in a step")
        cause = self._runner.explain(error)
        self._cause_of_death = f"the engine stopped after an error in a step: {cause}"
        ended = [
            ending(owner.live, owner.index, "error", self._cause_of_death)
            for owner in self._owner.values()
        ]
        self._scheduler.fail_all()
        self._owner.clear()
        self._requests.clear()
        self._in_flight.clear()
        self._preparing.clear()
        self._deadlines.clear()
        self._num_guided = 0
        return ended
