"""What runs on the device: pure functions, compiled once per shape by `paged.runtime.programs`.

A step is two programs, enqueued together: `forward` (page-table updates, and the model's layers)
for its bucket, then `sample` (logits of each row's last token, and the choice among them) for its
number of rows and sampling mode. They are apart so that the number of large programs is the number
of buckets, not buckets times modes, and so that many tokens of few rows make few logits. Some
small programs are run when needed: `score` (log-probabilities of prompt tokens), `copy_pages`
(copy-on-write), `read_pages` and `write_pages` (moves to the host and back) and `update_tables`
(admissions that bring more pages than a step has room for).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from paged.attention import BACKENDS, attention_metadata
from paged.attention.tiling import BY_RULE, Tilings
from paged.cache import CacheSpec, PagedKVCache
from paged.host_pages import STACK_SIZE
from paged.models.config import ModelConfig
from paged.models.mesh import gathered
from paged.models.registry import Family
from paged.models.stages import Stage
from paged.runtime.batch import (
    ON_DEVICE,
    Layout,
    StepBatch,
    unpack,
    unpack_sampling,
)
from paged.runtime.buckets import Bucket, Buckets
from paged.runtime.placement import ONE_DEVICE, Placement
from paged.runtime.sampler import (
    SamplerState,
    SamplingMode,
    SamplingRows,
    TokenLogprobs,
    checked_tokens,
    choose_tokens,
    count_tokens,
    token_logprobs,
)
from paged.runtime.sampling_params import MAX_TOKEN_RULES

# What one call of a small program takes: pages to copy, table entries to change, known tokens to
# count, slots to give a token mask. Whoever has more calls again.
COPY_ROOM = 64
UPDATE_ROOM = 4096
HISTORY_ROOM = 1024
MASK_ROOM = 32
# Pages of an array that goes to the host or comes back: whatever number goes is made up of these,
# since padding would take host memory.
MOVE_SIZES = (1, 4, STACK_SIZE)
# Of the largest, so many in one call: a call costs the host as much as three of them cost the bus.
MOVES_AT_ONCE = 4
MOVE_SHAPES = (*((1, size) for size in MOVE_SIZES), (MOVES_AT_ONCE, STACK_SIZE))
MOST_MOVED = MOVES_AT_ONCE * STACK_SIZE
NUM_RULES = MAX_TOKEN_RULES + 64
# At a time, where logits of all rows and what is made of them would take much memory.
_SCORE_ROWS, SAMPLE_ROWS = 64, 256


@struct.dataclass
class SlotState:
    """What each slot keeps on the device between steps.

    Attributes:
        page_tables: [S, P] int32 of each group of layers, padded with the null page. An entry that
            a window has left behind keeps its page; nothing reads it unmasked.
        last_token: [S] int32, the newest sampled token.
    """

    page_tables: tuple[jax.Array, ...]
    last_token: jax.Array

    @classmethod
    def zeros(cls, num_slots: int, pages_per_sequence: int, num_groups: int = 1) -> SlotState:
        size = num_slots, pages_per_sequence
        return cls(
            page_tables=tuple(jnp.zeros(size, jnp.int32) for _ in range(num_groups)),
            last_token=jnp.zeros(num_slots, jnp.int32),
        )


@struct.dataclass
class Sampled:
    """What a step gives back.

    Attributes:
        tokens: [R] int32, `NO_TOKEN` where there is none.
        logprobs: of those tokens, in LOGPROBS mode; else None.
    """

    tokens: jax.Array
    logprobs: TokenLogprobs | None


@struct.dataclass
class ForwardOut:
    """What the forward program hands on, padded to the most rows M that sampling takes.

    Attributes:
        last_hidden: [M, D] final hidden states of each row's last token.
        sampling: [M, F] int32, the sampling part of the packed step.
        hidden: [T, D] final hidden states, for `score`; None in decode-only steps.
        relay: [T, D] hidden states for the next stage, of a model in stages; else None. What the
            last layer would make is meaningless then, but for the last stage.
    """

    last_hidden: jax.Array
    sampling: jax.Array
    hidden: jax.Array | None
    relay: jax.Array | None = None


@dataclass(frozen=True)
class StepShapes:
    """All that the programs are specialised for.

    Attributes:
        family, model: what is computed.
        cache: the pages.
        buckets: step shapes.
        max_model_len: positions a page table must hold.
        backend: attention backend (see `paged.attention.BACKENDS`).
        tilings: what was measured of its kernels.
        num_host_pages: pages in host memory.
        transit_room: pages on their way from or to the host that the device has room for.
        placement: the devices. `model` and `cache` are what each of them sees.
        stage: the layers that these devices run; None for all.
    """

    family: Family
    model: ModelConfig
    cache: CacheSpec
    buckets: Buckets
    max_model_len: int
    backend: str
    tilings: Tilings = BY_RULE
    num_host_pages: int = 0
    transit_room: int = 0
    placement: Placement = ONE_DEVICE
    stage: Stage | None = None

    @property
    def bytes_per_host_page(self) -> int:
        """Of what all devices keep in a page."""
        return self.cache.bytes_per_page * self.placement.num_devices

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_model_len // self.cache.page_size)

    def layout(self, bucket: Bucket) -> Layout:
        return Layout.make(bucket, self.cache.page_size, len(self.cache.windows))

    def slot_state(self) -> SlotState:
        num_slots, num_groups = self.buckets.max_num_seqs, len(self.cache.windows)
        return SlotState.zeros(num_slots, self.pages_per_sequence, num_groups)

    def sampler_state(self) -> SamplerState:
        return SamplerState.zeros(self.buckets.max_num_seqs, self.model.vocab_size, NUM_RULES)


def forward(
    params: Any,
    cache: PagedKVCache,
    slots: SlotState,
    packed: jax.Array,
    relay: jax.Array | None = None,
    *,
    shapes: StepShapes,
    bucket: Bucket,
) -> tuple[PagedKVCache, SlotState, ForwardOut]:
    """Run the model over a step's tokens. Cache and slots are donated.

    Args:
        relay: [T, D] what the stage before made of them, for any stage but the first.
    """
    batch = unpack(packed, shapes.layout(bucket))
    slots = replace(slots, page_tables=_update_tables(slots.page_tables, batch.updates))
    page_tables, *other_tables = slots.page_tables
    meta = attention_metadata(
        page_tables,
        batch.slots,
        batch.query_len,
        batch.context_len,
        num_tokens=bucket.num_tokens,
        page_size=shapes.cache.page_size,
        tile_size=BACKENDS[shapes.backend]().tile_size,
        decode_only=bucket.decode_only,
        backend=shapes.backend,
        tilings=shapes.tilings,
        other_tables=other_tables,
    )
    last = jnp.maximum(meta.query_start + batch.query_len - 1, 0)
    tokens = _fill_newest(batch, last, slots.last_token)
    cache = replace(cache, relay=relay)
    hidden, cache = shapes.family.forward(params, shapes.model, tokens, cache, meta)
    rows = hidden if bucket.decode_only else hidden[last]
    padding = ((0, shapes.buckets.sampling[-1] - bucket.num_rows), (0, 0))
    out = ForwardOut(
        last_hidden=jnp.pad(rows, padding),
        sampling=jnp.pad(batch.sampling, padding),
        hidden=None if bucket.decode_only else hidden,
        relay=cache.relay,
    )
    return replace(cache, relay=None), slots, out


def take(slots: SlotState, sampling: jax.Array, tokens: jax.Array, *, num_rows: int) -> SlotState:
    """Note the newest tokens [num_rows], which another stage has chosen; slots are donated.

    For `sampling` see `ForwardOut`.
    """
    rows = unpack_sampling(sampling[:num_rows])
    return _with_newest(slots, rows, tokens)


def _fill_newest(batch: StepBatch, last: jax.Array, last_token: jax.Array) -> jax.Array:
    """[T] token ids; a row's last token may be known to the device alone."""
    known = batch.tokens[last]
    newest = jnp.where(known == ON_DEVICE, last_token[batch.slots], known)
    target = jnp.where(batch.query_len > 0, last, batch.tokens.shape[0])
    return batch.tokens.at[target].set(newest, mode="drop")


def sample(
    params: Any,
    slots: SlotState,
    state: SamplerState | None,
    last_hidden: jax.Array,
    sampling: jax.Array,
    *,
    shapes: StepShapes,
    num_rows: int,
    mode: SamplingMode,
) -> tuple[SlotState, SamplerState | None, Sampled]:
    """Choose the next token of the first `num_rows` rows. Slots and sampler state are donated.

    `state` is None below ADJUSTED; for `last_hidden` and `sampling` see `ForwardOut`.
    """
    vocab_size = shapes.model.vocab_size

    def choose(hidden: jax.Array, sampling: jax.Array) -> tuple[jax.Array, Sampled]:
        logits = shapes.family.logits(params, shapes.model, hidden)
        if mode > SamplingMode.RANDOM:  # these look at all logits of a row
            logits = gathered(logits, vocab_size)
        tokens = choose_tokens(logits, unpack_sampling(sampling), state, mode, vocab_size)
        logprobs = token_logprobs(logits, tokens) if mode == SamplingMode.LOGPROBS else None
        return tokens, Sampled(checked_tokens(logits, tokens, vocab_size), logprobs)

    last_hidden, sampling = last_hidden[:num_rows], sampling[:num_rows]
    at_once = num_rows if state is None else SAMPLE_ROWS
    tokens, sampled = _by_groups(choose, at_once, last_hidden, sampling)
    rows = unpack_sampling(sampling)
    slots = _with_newest(slots, rows, tokens)
    return slots, None if state is None else count_tokens(state, rows, tokens), sampled


def _with_newest(slots: SlotState, rows: SamplingRows, tokens: jax.Array) -> SlotState:
    target = jnp.where(rows.samples, rows.slots, slots.last_token.shape[0])
    return replace(slots, last_token=slots.last_token.at[target].set(tokens, mode="drop"))


def score(
    params: Any, hidden: jax.Array, targets: jax.Array, *, shapes: StepShapes
) -> TokenLogprobs:
    """Log-probabilities of `targets` [T] after the hidden states [T, D].

    Logits of all T tokens are never held at once.
    """

    def group(hidden: jax.Array, targets: jax.Array) -> TokenLogprobs:
        logits = shapes.family.logits(params, shapes.model, hidden)
        return token_logprobs(gathered(logits, shapes.model.vocab_size), targets)

    return _by_groups(group, _SCORE_ROWS, hidden, targets)


def _by_groups[T](function: Callable[..., T], most: int, *arrays: jax.Array) -> T:
    """What a function makes of the rows of arrays, `most` at a time, one group after the other."""
    num_rows = arrays[0].shape[0]
    groups = -(-num_rows // most)
    if groups == 1:
        return function(*arrays)
    padding = -num_rows % groups

    def grouped(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, padding), *[(0, 0)] * (array.ndim - 1)))
        return padded.reshape(groups, -1, *array.shape[1:])

    made = lax.map(lambda rows: function(*rows), tuple(map(grouped, arrays)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_rows], made)


def update_tables(slots: SlotState, updates: jax.Array) -> SlotState:
    """Apply page updates [UPDATE_ROOM, 3] (see `PageUpdate`); donated."""
    return replace(slots, page_tables=_update_tables(slots.page_tables, updates))


def _update_tables(page_tables: tuple[jax.Array, ...], updates: jax.Array) -> tuple[jax.Array, ...]:
    updated = []
    for group, tables in enumerate(page_tables):
        num_slots = tables.shape[0]
        slot = updates[:, 0] - group * num_slots
        if group:  # an index below zero would count from the end
            slot = jnp.where(slot < 0, num_slots, slot)
        updated.append(tables.at[slot, updates[:, 1]].set(updates[:, 2], mode="drop"))
    return tuple(updated)
