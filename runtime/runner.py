"""The device side of an engine: parameters, pages and slot state, and the launching of steps.

`launch` only enqueues: its result is read one step later, when the next step is already queued.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np
from numpy.typing import NDArray

from paged.host_pages import PageMove
from paged.models.layers import DecoderParams
from paged.runtime.batch import SlotSampling, pack, pack_updates
from paged.runtime.buckets import Bucket
from paged.runtime.compiler import Compiler
from paged.runtime.fingerprint import fingerprint
from paged.runtime.host_store import HostStore
from paged.runtime.kept_files import source_digest
from paged.runtime.load_costs import LoadCosts, load_costs
from paged.runtime.plan import PageCopy, Row, StepPlan
from paged.runtime.programs import Programs
from paged.runtime.sampler import EVERY_TOKEN, SamplingMode, TokenLogprobs
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.sequence import Sequence
from paged.runtime.steps import (
    COPY_ROOM,
    HISTORY_ROOM,
    MASK_ROOM,
    MOST_MOVED,
    NUM_RULES,
    UPDATE_ROOM,
    ForwardOut,
    Sampled,
    StepShapes,
)

FOREVER = 2**30
"""A token rule without end, in output tokens."""


@dataclass(frozen=True)
class SlotRequest:
    """How the sequence in a slot wants its tokens.

    Attributes:
        params: of its request.
        seed: 64 bits, its own.
        stop_token_ids: every id that would end it, masked before min_tokens.
        guided: whether each of its tokens waits for a mask.
    """

    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    guided: bool = False

    @property
    def mode(self) -> SamplingMode:
        params = self.params
        if params.logprobs is not None:
            return SamplingMode.LOGPROBS
        if self.has_history or self.rules or self.guided:
            return SamplingMode.ADJUSTED
        if params.greedy:
            return SamplingMode.GREEDY
        filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return SamplingMode.FILTERED if filters else SamplingMode.RANDOM

    @property
    def has_history(self) -> bool:
        """Whether its earlier tokens matter to sampling."""
        params = self.params
        return (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    @property
    def rules(self) -> list[tuple[int, float, int]]:
        """(token, bias, number of output tokens up to which it holds)."""
        params = self.params
        rules = [(token, bias, FOREVER) for token, bias in (params.logit_bias or {}).items()]
        rules += [(token, np.inf, FOREVER) for token in params.allowed_token_ids or ()]
        rules += [(token, -np.inf, FOREVER) for token in params.banned_token_ids or ()]
        if params.min_tokens > 0:
            stops = sorted(self.stop_token_ids)
            rules += [(token, -np.inf, params.min_tokens) for token in stops]
        return rules


@dataclass(frozen=True)
class StepResult:
    """The tokens sampled for each row, and log-probabilities where asked for.

    Attributes:
        tokens: [R]; meaningless for rows that do not sample.
        logprobs: of those tokens, or None.
        prompt_logprobs: of the step's prompt tokens, flat as in the step, or None.
    """

    tokens: NDArray[np.int32]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Started:
    """A step whose forward program is enqueued, and whose tokens are not chosen yet.

    Attributes:
        launch_time: see `InFlight`.
        slots: of its rows.
    """

    plan: StepPlan
    bucket: Bucket
    launch_time: float
    slots: NDArray[np.int32]
    out: ForwardOut
    prompt_logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class InFlight:
    """A launched step whose result is on its way to the host.

    Attributes:
        launch_time: when its forward program was enqueued; seconds, `time.perf_counter`.
    """

    plan: StepPlan
    bucket: Bucket
    launch_time: float
    sampled: Sampled
    prompt_logprobs: TokenLogprobs | None

    @property
    def age(self) -> float:
        """Seconds since it was enqueued."""
        return time.perf_counter() - self.launch_time

    def read(self) -> StepResult:
        """Wait for the step. Raises what the device raised."""
        tokens = np.asarray(self.sampled.tokens)
        logprobs, prompt_logprobs = jax.device_get((self.sampled.logprobs, self.prompt_logprobs))
        return StepResult(tokens, logprobs, prompt_logprobs)


class StepRunner:
    """Owns everything on the device; every call enqueues work and returns.

    Attributes:
        host: where pages go that leave the device.
    """

    def __init__(
        self, shapes: StepShapes, params: DecoderParams, compiler: Compiler, *, progress: bool
    ) -> None:
        """Compile every program, then take the memory of pages and slots."""
        self.shapes = shapes
        self._params = params
        self._head = params.without_layers
        self._programs = Programs(shapes, params, compiler, show_progress=progress)
        self._cache = shapes.placement.zeros(shapes.cache)
        self._slots = shapes.placement.copied(shapes.slot_state())
        self._sampler = shapes.placement.copied(shapes.sampler_state())
        self._sampling = SlotSampling(shapes.buckets.max_num_seqs)
        self._modes: NDArray[np.int8] = np.zeros(shapes.buckets.max_num_seqs, np.int8)
        self._scoring: set[int] = set()
        self._ruled: set[int] = set()
        self._masked: set[int] = set()
        if jax.default_backend() != "cpu":
            self._run_each_step_once()
        self.host = HostStore(shapes, self._programs, self._cache.layers[0].values.sharding)

    @property
    def params(self) -> DecoderParams:
        """The weights."""
        return self._params

    def counted(self, bucket: Bucket) -> Mapping[str, float]:
        """What XLA counts in the forward program of a bucket, such as "flops"; maybe nothing."""
        return self._programs["forward", bucket].cost_analysis() or {}

    def measure_loads(self) -> LoadCosts:
        """What it costs to load host pages, and to compute tokens instead."""
        size = MOST_MOVED
        self._cache, (one, many) = self.host.time_loads(self._cache)
        bucket = self.shapes.buckets.all()[0]
        step = min(self._time_step(bucket) for _ in range(3))
        return load_costs(one, many, size, step, bucket.num_tokens)

    def measure_smallest_step(self) -> float:
        """Seconds that a step of the fewest rows takes."""
        return min(self._time_step(self.shapes.buckets.all()[-1]) for _ in range(3))

    def fingerprint(self) -> str:
        """A name for what this model writes to its pages, here and in other processes."""
        cache, size = replace(self.shapes.cache, num_pages=0), self.shapes.placement.num_devices
        return fingerprint(self._params, (self.shapes.model, cache, size, source_digest()))

    def move(self, moves: tuple[PageMove, ...]) -> None:
        """Enqueue moves of pages to the host and back."""
        self._cache = self.host.move(self._cache, moves)

    def close(self) -> None:
        """Give the device's memory back."""
        self.host.close()
        held = (self._params, self._cache, self._slots, self._sampler)
        for array in jax.tree.leaves(held):
            array.delete()

    def admit(self, sequence: Sequence, request: SlotRequest) -> None:
        """Prepare the slot that a sequence was given, before the step that first uses it."""
        assert sequence.slot is not None, "an admitted sequence has a slot"
        params = request.params
        floats = {
            "temperature": params.effective_temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
        }
        vocab_size = self.shapes.model.vocab_size
        top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        self._sampling.set(sequence.slot, request.seed, top_k, floats)
        self._modes[sequence.slot] = request.mode
        (self._scoring.discard if params.prompt_logprobs is None else self._scoring.add)(
            sequence.slot
        )
        self._load_rules(sequence.slot, request.rules)
        if not request.guided and sequence.slot in self._masked:
            self._forget_mask(sequence.slot)
        if request.has_history:
            self._load_history(sequence.slot, sequence)

    def launch(self, plan: StepPlan) -> InFlight:
        """Enqueue one step."""
        return self.finish(self.start(plan))

    def start(self, plan: StepPlan) -> Started:
        """Enqueue all of a step but the choice of its tokens."""
        scores = bool(self._scoring) and any(self._scores_prompt(row) for row in plan.rows)
        bucket = self.shapes.buckets.pick(plan, scores_prompt=scores)
        layout = self.shapes.layout(bucket)
        plan = self._make_room(plan, layout.num_updates)
        self.move(plan.moves)
        self._copy_pages(plan.copies)
        packed = pack(plan, layout, self._sampling)
        # The call itself transfers it, in a third of the time that `device_put` takes before one,
        # maybe after it has returned: from here on nobody writes to the array.
        self._cache, self._slots, out = self._programs["forward", bucket](
            self._params, self._cache, self._slots, packed
        )
        launch_time = time.perf_counter()
        prompt_logprobs = self._score(plan, bucket, out) if scores else None
        slots = layout.slots(packed, len(plan.rows))
        return Started(plan, bucket, launch_time, slots, out, prompt_logprobs)

    def load_masks(self, slots: list[int], masks: NDArray[np.int32]) -> None:
        """Say which tokens may come next in slots that have a grammar: masks [len(slots), W]."""
        self._masked.update(slots)
        for start in range(0, len(slots), MASK_ROOM):
            part = slots[start : start + MASK_ROOM]
            padded = np.zeros((MASK_ROOM, masks.shape[1]), np.int32)
            padded[: len(part)] = masks[start : start + MASK_ROOM]
            places = np.full(MASK_ROOM, self.shapes.buckets.max_num_seqs, np.int32)
            places[: len(part)] = part
            inputs = jax.device_put((places, padded))
            self._sampler = self._programs[("load_masks",)](self._sampler, *inputs)

    def finish(self, step: Started) -> InFlight:
        """Enqueue the choice of a started step's tokens. Steps are finished in their order."""
        sampled = self._sample(step.slots, step.out)
        result = InFlight(step.plan, step.bucket, step.launch_time, sampled, step.prompt_logprobs)
        for array in jax.tree.leaves((result.sampled, result.prompt_logprobs)):
            array.copy_to_host_async()
        return result

    def _run_each_step_once(self) -> None:
        """Run every step without any row: a GPU takes up to 0.2 s to prepare a program's first."""
        for bucket in self.shapes.buckets.all():
            out = self._run_empty(bucket)
        for mode in SamplingMode:
            for rows in self.shapes.buckets.sampling:
                self._enqueue_sampling(rows, mode, out)
        jax.block_until_ready(self._slots)

    def _run_empty(self, bucket: Bucket) -> ForwardOut:
        """Enqueue a step without any row, which takes the time of a full one but for attention."""
        nothing = StepPlan(rows=(), admitted=(), page_updates=(), copies=())
        packed = pack(nothing, self.shapes.layout(bucket), self._sampling)
        out: ForwardOut
        self._cache, self._slots, out = self._programs["forward", bucket](
            self._params, self._cache, self._slots, packed
        )
        return out

    def _time_step(self, bucket: Bucket) -> float:
        """Seconds that a step without any row takes."""
        started = time.perf_counter()
        jax.block_until_ready(self._run_empty(bucket))
        return time.perf_counter() - started

    def _sample(self, slots: NDArray[np.int32], out: ForwardOut) -> Sampled:
        """Enqueue the choice of a token for each row; `slots` are the rows'."""
        mode = SamplingMode(int(self._modes[slots].max()))
        return self._enqueue_sampling(self.shapes.buckets.sampling_rows(len(slots)), mode, out)

    def _enqueue_sampling(self, rows: int, mode: SamplingMode, out: ForwardOut) -> Sampled:
        sample = self._programs["sample", rows, mode]
        kept = self._sampler if mode >= SamplingMode.ADJUSTED else None
        self._slots, kept, sampled = sample(
            self._head, self._slots, kept, out.last_hidden, out.sampling
        )
        if kept is not None:
            self._sampler = kept
        return sampled

    def _scores_prompt(self, row: Row) -> bool:
        return row.slot in self._scoring and row.start + 1 < len(row.sequence.prompt)

    def _score(self, plan: StepPlan, bucket: Bucket, out: ForwardOut) -> TokenLogprobs:
        """Score every token of the step by the one that follows it in its prompt."""
        targets = np.zeros(bucket.num_tokens, np.int32)
        begin = 0
        for row in plan.rows:
            following = row.sequence.prompt[row.start + 1 : row.start + 1 + row.length]
            targets[begin : begin + len(following)] = following
            begin += row.length
        program = self._programs["score", bucket.num_tokens]
        return program(self._head, out.hidden, jax.device_put(targets))

    def _make_room(self, plan: StepPlan, room: int) -> StepPlan:
        """Send page updates that a step has no room for ahead of it."""
        updates = plan.page_updates
        if len(updates) <= room:
            return plan
        while len(updates) > room:
            ahead, updates = updates[:UPDATE_ROOM], updates[UPDATE_ROOM:]
            packed = jax.device_put(pack_updates(ahead, UPDATE_ROOM))
            self._slots = self._programs[("update_tables",)](self._slots, packed)
        return replace(plan, page_updates=updates)

    def _copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        for start in range(0, len(copies), COPY_ROOM):
            # Padding targets lie beyond the pages and differ.
            pairs = np.zeros((2, COPY_ROOM), np.int32)
            pairs[1] = self.shapes.cache.num_pages + np.arange(COPY_ROOM)
            part = copies[start : start + COPY_ROOM]
            pairs[:, : len(part)] = np.array(part, np.int32).T
            source, target = jax.device_put((pairs[0], pairs[1]))
            self._cache = self._programs[("copy_pages",)](self._cache, source, target)

    def _load_rules(self, slot: int, rules: list[tuple[int, float, int]]) -> None:
        """Set a slot's rules, also to none where the sequence before it left some."""
        if not rules and slot not in self._ruled:
            return
        (self._ruled.add if rules else self._ruled.discard)(slot)
        tokens = np.full(NUM_RULES, self.shapes.model.vocab_size, np.int32)
        bias, until = np.zeros(NUM_RULES, np.float32), np.zeros(NUM_RULES, np.int32)
        for i, rule in enumerate(rules):
            tokens[i], bias[i], until[i] = rule
        inputs = jax.device_put((np.int32(slot), tokens, bias, until))
        self._sampler = self._programs[("load_rules",)](self._sampler, *inputs)

    def _forget_mask(self, slot: int) -> None:
        num_words = self._sampler.allowed.shape[1]
        self.load_masks([slot], np.full((1, num_words), EVERY_TOKEN, np.int32))
        self._masked.discard(slot)

    def _load_history(self, slot: int, sequence: Sequence) -> None:
        known = sequence.tokens(0, sequence.num_tokens)
        for start in range(0, len(known), HISTORY_ROOM):
            part = known[start : start + HISTORY_ROOM]
            tokens = np.full(HISTORY_ROOM, self.shapes.model.vocab_size, np.int32)
            tokens[: len(part)] = part
            num_prompt = np.int32(max(len(sequence.prompt) - start, 0))
            inputs = jax.device_put((np.int32(slot), tokens, num_prompt, np.bool_(start == 0)))
            self._sampler = self._programs[("load_history",)](self._sampler, *inputs)
