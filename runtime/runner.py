"""Steps as an engine launches them: plans made into what the device is called with.

`launch` only enqueues: its result is read one step later, when the next step is already queued.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from paged.cache import PageStack, read_pages
from paged.host_pages import PageMove
from paged.models.layers import DecoderParams
from paged.runtime.batch import SlotSampling, pack, pack_updates
from paged.runtime.buckets import Bucket
from paged.runtime.fingerprint import fingerprint
from paged.runtime.host_store import HostStore
from paged.runtime.kept_files import source_digest
from paged.runtime.load_costs import LoadCosts, load_costs
from paged.runtime.lowering import Key
from paged.runtime.plan import PageCopy, Row, StepPlan
from paged.runtime.sampler import EVERY_TOKEN, SamplingMode, TokenLogprobs, num_words
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.sequence import Sequence
from paged.runtime.step_device import Device, Result
from paged.runtime.steps import (
    COPY_ROOM,
    HISTORY_ROOM,
    MASK_ROOM,
    MOST_MOVED,
    NUM_RULES,
    UPDATE_ROOM,
    Sampled,
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
    prompt_logprobs: Result | None


@dataclass(frozen=True)
class InFlight:
    """A launched step whose result is on its way to the host.

    Attributes:
        launch_time: when its forward program was enqueued; seconds, `time.perf_counter`.
    """

    plan: StepPlan
    bucket: Bucket
    launch_time: float
    sampled: Result
    prompt_logprobs: Result | None

    @property
    def age(self) -> float:
        """Seconds since it was enqueued."""
        return time.perf_counter() - self.launch_time

    def read(self) -> StepResult:
        """Wait for the step. Raises what the device raised."""
        sampled: Sampled | None = self.sampled.arrays
        assert sampled is not None, "a step is read when it has gone through all stages"
        tokens = np.asarray(sampled.tokens)
        scored = self.prompt_logprobs and self.prompt_logprobs.arrays
        logprobs, prompt_logprobs = jax.device_get((sampled.logprobs, scored))
        return StepResult(tokens, logprobs, prompt_logprobs)


class StepRunner:
    """Launches steps on a device; every call enqueues work and returns.

    Attributes:
        host: where pages go that leave the device.
    """

    def __init__(self, device: Device) -> None:
        self.shapes = shapes = device.shapes
        self._device = device
        self._num_words = num_words(shapes.model.vocab_size)
        self._sampling = SlotSampling(shapes.buckets.max_num_seqs)
        self._modes: NDArray[np.int8] = np.zeros(shapes.buckets.max_num_seqs, np.int8)
        self._scoring: set[int] = set()
        self._ruled: set[int] = set()
        self._masked: set[int] = set()
        self._has_waves = False
        if jax.default_backend() != "cpu":
            self._run_each_step_once()
        sharding = device.cache.layers[0].values.sharding
        self.host = HostStore(shapes, device.programs, sharding)

    @property
    def params(self) -> DecoderParams:
        """The weights."""
        return self._device.params

    def counted(self, bucket: Bucket) -> Mapping[str, float]:
        """What XLA counts in the forward program of a bucket, such as "flops"; maybe nothing."""
        return self._device.programs["forward", bucket].cost_analysis() or {}

    def measure_loads(self) -> LoadCosts:
        """What it costs to load host pages, and to compute tokens instead."""
        size = MOST_MOVED
        self._device.cache, (one, many) = self.host.time_loads(self._device.cache)
        bucket = self.shapes.buckets.all()[0]
        step = min(self._time_step(bucket) for _ in range(3))
        return load_costs(one, many, size, step, bucket.num_tokens)

    def measure_smallest_step(self) -> float:
        """Seconds that a step of the fewest rows takes."""
        return min(self._time_step(self.shapes.buckets.all()[-1]) for _ in range(3))

    def fingerprint(self) -> str:
        """A name for what this model writes to its pages, here and in other processes."""
        cache, size = replace(self.shapes.cache, num_pages=0), self.shapes.placement.num_devices
        return fingerprint(self._device.params, (self.shapes.model, cache, size, source_digest()))

    def move(self, moves: tuple[PageMove, ...]) -> None:
        """Enqueue moves of pages to the host and back."""
        self._device.cache = self.host.move(self._device.cache, moves)

    def read(self, pages: list[int]) -> Iterator[PageStack]:
        """Enqueue the copying of pages to the host, after the steps that are enqueued."""
        return self.host.read(self._device.cache, pages)

    @property
    def page_parts(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes [layers, page_size, ..] and types of what all devices keep in a page."""
        cache = self.shapes.placement.cache_shapes(self.shapes.cache)
        [stack] = jax.eval_shape(read_pages, cache, jax.ShapeDtypeStruct((1, 1), jnp.int32))
        return [jax.ShapeDtypeStruct(part.shape[1:], part.dtype) for part in stack]

    def close(self) -> None:
        """Give the device's memory back."""
        self.host.close()
        self._device.close()

    def explain(self, error: Exception) -> str:
        """What a step has failed of."""
        return self._device.explain(error)

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
        self._forward(bucket, packed)
        launch_time = time.perf_counter()
        prompt_logprobs = self._score(plan, bucket) if scores else None
        slots = layout.slots(packed, len(plan.rows))
        return Started(plan, bucket, launch_time, slots, prompt_logprobs)

    def drain(self) -> None:
        """Have a device of stages enqueue all that is left of the steps that were finished."""
        if self._has_waves:
            self._device.call(("drain",))
            self._has_waves = False

    def load_masks(self, slots: list[int], masks: NDArray[np.int32]) -> None:
        """Say which tokens may come next in slots that have a grammar: masks [len(slots), W]."""
        self._masked.update(slots)
        for start in range(0, len(slots), MASK_ROOM):
            part = slots[start : start + MASK_ROOM]
            padded = np.zeros((MASK_ROOM, masks.shape[1]), np.int32)
            padded[: len(part)] = masks[start : start + MASK_ROOM]
            places = np.full(MASK_ROOM, self.shapes.buckets.max_num_seqs, np.int32)
            places[: len(part)] = part
            self._device.call(("load_masks",), places, padded)

    def finish(self, step: Started) -> InFlight:
        """Enqueue the choice of a started step's tokens. Steps are finished in their order."""
        sampled = self._sample(step.slots)
        return InFlight(step.plan, step.bucket, step.launch_time, sampled, step.prompt_logprobs)

    def _run_each_step_once(self) -> None:
        """Run every step without any row: a GPU takes up to 0.2 s to prepare a program's first."""
        for bucket in self.shapes.buckets.all():
            self._run_empty(bucket)
        for mode in SamplingMode:
            for rows in self.shapes.buckets.sampling:
                self._run_empty(self.shapes.buckets.all()[-1])
                self._device.call(("sample", rows, mode))
        self.drain()
        self._device.wait()

    def _run_empty(self, bucket: Bucket) -> None:
        """Enqueue a step without any row, which takes the time of a full one but for attention."""
        nothing = StepPlan(rows=(), admitted=(), page_updates=(), copies=())
        self._forward(bucket, pack(nothing, self.shapes.layout(bucket), self._sampling))

    def _forward(self, bucket: Bucket, packed: NDArray[np.int32]) -> None:
        self._has_waves = self.shapes.stage is not None
        self._device.call(("forward", bucket), packed)

    def _time_step(self, bucket: Bucket) -> float:
        """Seconds that a step without any row takes."""
        started = time.perf_counter()
        self._run_empty(bucket)
        self.drain()
        self._device.wait()
        return time.perf_counter() - started

    def _sample(self, slots: NDArray[np.int32]) -> Result:
        """Enqueue the choice of a token for each row; `slots` are the rows'."""
        mode = SamplingMode(int(self._modes[slots].max()))
        rows = self.shapes.buckets.sampling_rows(len(slots))
        return self._given(("sample", rows, mode))

    def _given(self, key: Key, *inputs: NDArray[np.int32]) -> Result:
        """Enqueue what gives a result."""
        result = self._device.call(key, *inputs)
        assert result is not None, "it makes something for the host"
        return result

    def _scores_prompt(self, row: Row) -> bool:
        return row.slot in self._scoring and row.start + 1 < len(row.sequence.prompt)

    def _score(self, plan: StepPlan, bucket: Bucket) -> Result:
        """Score every token of the step by the one that follows it in its prompt."""
        targets = np.zeros(bucket.num_tokens, np.int32)
        begin = 0
        for row in plan.rows:
            following = row.sequence.prompt[row.start + 1 : row.start + 1 + row.length]
            targets[begin : begin + len(following)] = following
            begin += row.length
        return self._given(("score", bucket.num_tokens), targets)

    def _make_room(self, plan: StepPlan, room: int) -> StepPlan:
        """Send page updates that a step has no room for ahead of it."""
        updates = plan.page_updates
        if len(updates) <= room:
            return plan
        while len(updates) > room:
            ahead, updates = updates[:UPDATE_ROOM], updates[UPDATE_ROOM:]
            self._device.call(("update_tables",), pack_updates(ahead, UPDATE_ROOM))
        return replace(plan, page_updates=updates)

    def _copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        for start in range(0, len(copies), COPY_ROOM):
            # Padding targets lie beyond the pages and differ.
            pairs = np.zeros((2, COPY_ROOM), np.int32)
            pairs[1] = self.shapes.cache.num_pages + np.arange(COPY_ROOM)
            part = copies[start : start + COPY_ROOM]
            pairs[:, : len(part)] = np.array(part, np.int32).T
            self._device.call(("copy_pages",), pairs[0], pairs[1])

    def _load_rules(self, slot: int, rules: list[tuple[int, float, int]]) -> None:
        """Set a slot's rules, also to none where the sequence before it left some."""
        if not rules and slot not in self._ruled:
            return
        (self._ruled.add if rules else self._ruled.discard)(slot)
        tokens = np.full(NUM_RULES, self.shapes.model.vocab_size, np.int32)
        bias, until = np.zeros(NUM_RULES, np.float32), np.zeros(NUM_RULES, np.int32)
        for i, rule in enumerate(rules):
            tokens[i], bias[i], until[i] = rule
        self._device.call(("load_rules",), np.int32(slot), tokens, bias, until)

    def _forget_mask(self, slot: int) -> None:
        self.load_masks([slot], np.full((1, self._num_words), EVERY_TOKEN, np.int32))
        self._masked.discard(slot)

    def _load_history(self, slot: int, sequence: Sequence) -> None:
        known = sequence.tokens(0, sequence.num_tokens)
        for start in range(0, len(known), HISTORY_ROOM):
            part = known[start : start + HISTORY_ROOM]
            tokens = np.full(HISTORY_ROOM, self.shapes.model.vocab_size, np.int32)
            tokens[: len(part)] = part
            num_prompt = np.int32(max(len(sequence.prompt) - start, 0))
            is_first = np.bool_(start == 0)
            self._device.call(("load_history",), np.int32(slot), tokens, num_prompt, is_first)
