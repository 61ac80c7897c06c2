"""The compiled programs of an engine: pure functions, one executable per shape, all made at start.

A step is two programs, enqueued together: `forward` (page-table updates, the model, logits of each
row's last token) for its bucket, then `sample` for its number of rows and sampling mode. They are
apart so that the number of large programs is the number of buckets, not buckets times modes. Three
small programs are run when needed: `score` (log-probabilities of prompt tokens), `copy_pages`
(copy-on-write) and `update_tables` (admissions that bring more pages than a step has room for).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.stages import Compiled
from tqdm import tqdm

from paged.attention import BACKENDS, attention_metadata
from paged.cache import CacheSpec, PagedKVCache, copy_pages
from paged.models.config import ModelConfig
from paged.models.registry import Family
from paged.runtime.batch import (
    ON_DEVICE,
    SAMPLING_FIELDS,
    Layout,
    StepBatch,
    unpack,
    unpack_sampling,
)
from paged.runtime.buckets import Bucket, Buckets
from paged.runtime.sampler import (
    SamplerState,
    SamplingMode,
    TokenLogprobs,
    choose_tokens,
    count_tokens,
    load_history,
    load_rules,
    token_logprobs,
)
from paged.runtime.sampling_params import MAX_TOKEN_RULES

Key = tuple[Any, ...]
"""Names a program: its kind, then what it is specialised for."""

COPY_ROOM = 64
UPDATE_ROOM = 4096
HISTORY_ROOM = 1024
NUM_RULES = MAX_TOKEN_RULES + 64
_SCORE_ROWS = 64


@struct.dataclass
class SlotState:
    """What each slot keeps on the device between steps.

    Attributes:
        page_tables: [S, P] int32, padded with the null page.
        last_token: [S] int32, the newest sampled token.
    """

    page_tables: jax.Array
    last_token: jax.Array

    @classmethod
    def zeros(cls, num_slots: int, pages_per_sequence: int) -> SlotState:
        return cls(
            page_tables=jnp.zeros((num_slots, pages_per_sequence), jnp.int32),
            last_token=jnp.zeros(num_slots, jnp.int32),
        )


@struct.dataclass
class Sampled:
    """What a step gives back.

    Attributes:
        tokens: [R] int32.
        logprobs: of those tokens, in LOGPROBS mode; else None.
    """

    tokens: jax.Array
    logprobs: TokenLogprobs | None


@struct.dataclass
class ForwardOut:
    """What the forward program hands on.

    Attributes:
        logits: [R, V] float32 of each row's last token.
        sampling: [R, F] int32, the sampling part of the packed step.
        hidden: [T, D] final hidden states, for `score`; None in decode-only steps.
    """

    logits: jax.Array
    sampling: jax.Array
    hidden: jax.Array | None


@dataclass(frozen=True)
class StepShapes:
    """All that the programs are specialised for.

    Attributes:
        family, model: what is computed.
        cache: the pages.
        buckets: step shapes.
        max_model_len: positions a page table must hold.
        backend: attention backend (see `paged.attention.BACKENDS`).
    """

    family: Family
    model: ModelConfig
    cache: CacheSpec
    buckets: Buckets
    max_model_len: int
    backend: str

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_model_len // self.cache.page_size)

    def layout(self, bucket: Bucket) -> Layout:
        return Layout.make(bucket, self.cache.page_size)

    def slot_state(self) -> SlotState:
        return SlotState.zeros(self.buckets.max_num_seqs, self.pages_per_sequence)

    def sampler_state(self) -> SamplerState:
        return SamplerState.zeros(self.buckets.max_num_seqs, self.model.vocab_size, NUM_RULES)


def forward(
    params: Any,
    cache: PagedKVCache,
    slots: SlotState,
    packed: jax.Array,
    *,
    shapes: StepShapes,
    bucket: Bucket,
) -> tuple[PagedKVCache, SlotState, ForwardOut]:
    """Run the model over a step's tokens. Cache and slots are donated."""
    batch = unpack(packed, shapes.layout(bucket))
    slots = replace(slots, page_tables=_update_tables(slots.page_tables, batch.updates))
    meta = attention_metadata(
        slots.page_tables,
        batch.slots,
        batch.query_len,
        batch.context_len,
        num_tokens=bucket.num_tokens,
        page_size=shapes.cache.page_size,
        tile_size=BACKENDS[shapes.backend]().tile_size,
        decode_only=bucket.decode_only,
        backend=shapes.backend,
    )
    last = jnp.maximum(meta.query_start + batch.query_len - 1, 0)
    tokens = _fill_newest(batch, last, slots.last_token)
    hidden, cache = shapes.family.forward(params, shapes.model, tokens, cache, meta)
    rows = hidden if bucket.decode_only else hidden[last]
    logits = shapes.family.logits(params, shapes.model, rows)
    return cache, slots, ForwardOut(logits, batch.sampling, None if bucket.decode_only else hidden)


def _fill_newest(batch: StepBatch, last: jax.Array, last_token: jax.Array) -> jax.Array:
    """[T] token ids; a row's last token may be known to the device alone."""
    known = batch.tokens[last]
    newest = jnp.where(known == ON_DEVICE, last_token[batch.slots], known)
    target = jnp.where(batch.query_len > 0, last, batch.tokens.shape[0])
    return batch.tokens.at[target].set(newest, mode="drop")


def sample(
    slots: SlotState,
    state: SamplerState | None,
    logits: jax.Array,
    sampling: jax.Array,
    *,
    mode: SamplingMode,
) -> tuple[SlotState, SamplerState | None, Sampled]:
    """Choose each row's next token. Slots and sampler state are donated.

    `state` is None below FILTERED; `sampling` is the step's [R, F] part (`unpack_sampling`).
    """
    rows = unpack_sampling(sampling)
    tokens = choose_tokens(logits, rows, state, mode)
    target = jnp.where(rows.samples, rows.slots, slots.last_token.shape[0])
    slots = replace(slots, last_token=slots.last_token.at[target].set(tokens, mode="drop"))
    if state is not None:
        state = count_tokens(state, rows, tokens)
    logprobs = token_logprobs(logits, tokens) if mode == SamplingMode.LOGPROBS else None
    return slots, state, Sampled(tokens, logprobs)


def score(
    params: Any, hidden: jax.Array, targets: jax.Array, *, shapes: StepShapes
) -> TokenLogprobs:
    """Log-probabilities of `targets` [T] after the hidden states [T, D].

    Works through groups of rows, so that logits of all T tokens are never held at once.
    """
    rows = min(_SCORE_ROWS, hidden.shape[0])
    groups = -(-hidden.shape[0] // rows)
    pad = groups * rows - hidden.shape[0]
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(groups, rows, -1)
    grouped = jnp.pad(targets, (0, pad)).reshape(groups, rows)

    def group(inputs: tuple[jax.Array, jax.Array]) -> TokenLogprobs:
        return token_logprobs(shapes.family.logits(params, shapes.model, inputs[0]), inputs[1])

    scored = lax.map(group, (hidden, grouped))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: targets.shape[0]], scored)


def update_tables(slots: SlotState, updates: jax.Array) -> SlotState:
    """Apply page updates [UPDATE_ROOM, 3] of (slot, entry, page); donated."""
    return replace(slots, page_tables=_update_tables(slots.page_tables, updates))


def _update_tables(page_tables: jax.Array, updates: jax.Array) -> jax.Array:
    return page_tables.at[updates[:, 0], updates[:, 1]].set(updates[:, 2], mode="drop")


class Programs:
    """Every compiled program of an engine, by kind and shape.

    Asking for one that was not compiled is a KeyError: nothing is ever compiled while serving.
    """

    def __init__(self, shapes: StepShapes, params: Any, *, progress: bool) -> None:
        """Compile everything, in parallel threads, with a progress bar if asked for."""
        self._compiled: dict[Key, Compiled] = {}
        jobs = dict(_jobs(shapes, abstract(params)))
        with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as threads:
            futures = {threads.submit(_compile, *job): key for key, job in jobs.items()}
            bar = tqdm(as_completed(futures), "Compiling", len(futures), disable=not progress)
            for done in bar:
                self._compiled[futures[done]] = done.result()

    def __getitem__(self, key: Key) -> Compiled:
        return self._compiled[key]

    def __len__(self) -> int:
        return len(self._compiled)


def step_memory(shapes: StepShapes, params: Any) -> int:
    """Bytes of device memory that steps need beside parameters, state and pages.

    As XLA reports it for the largest programs: temporaries of one, and the outputs of the two steps
    that can be in flight.
    """
    jobs = dict(_jobs(shapes, abstract(params)))
    rows = shapes.buckets.decode[-1]
    largest = (
        ("forward", Bucket(rows, rows, True)),
        ("forward", shapes.buckets.all()[0]),
        ("sample", shapes.buckets.row_counts[-1], SamplingMode.LOGPROBS),
        ("score", shapes.buckets.mixed[-1]),
    )
    reports = [_report(_compile(*jobs[key])) for key in largest]
    temporary = max(report.temp_size_in_bytes for report in reports)
    outputs = max(report.output_size_in_bytes - report.alias_size_in_bytes for report in reports)
    return int(temporary + 2 * outputs)


def abstract(tree: Any) -> Any:
    """The shapes, dtypes and shardings of a pytree's arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
        tree,
    )


def _report(program: Compiled) -> Any:
    report = program.memory_analysis()
    assert report is not None, "this backend does not report the memory of its programs"
    return report


Job = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A function, its abstract arguments, and which of them are donated."""


def _compile(
    function: Callable[..., Any], args: tuple[Any, ...], donated: tuple[int, ...]
) -> Compiled:
    return jax.jit(function, donate_argnums=donated).lower(*args).compile()


def _jobs(shapes: StepShapes, params: Any) -> Iterator[tuple[Key, Job]]:
    """Every program, the slowest to compile first."""
    cache = PagedKVCache.shapes(shapes.cache)
    slots = jax.eval_shape(shapes.slot_state)
    state = jax.eval_shape(shapes.sampler_state)
    logits: dict[int, jax.ShapeDtypeStruct] = {}
    for bucket in shapes.buckets.all():
        step = partial(forward, shapes=shapes, bucket=bucket)
        inputs = (params, cache, slots, _int32(shapes.layout(bucket).size))
        yield ("forward", bucket), (step, inputs, (1, 2))
        out = jax.eval_shape(step, *inputs)[2]
        logits[bucket.num_rows] = out.logits
        if out.hidden is not None:
            targets = _int32(bucket.num_tokens)
            scorer = partial(score, shapes=shapes)
            yield ("score", bucket.num_tokens), (scorer, (params, out.hidden, targets), ())
    for rows in shapes.buckets.row_counts:
        fields = _int32(rows, len(SAMPLING_FIELDS))
        for mode in SamplingMode:
            kept = state if mode >= SamplingMode.FILTERED else None
            args = (slots, kept, logits[rows], fields)
            yield ("sample", rows, mode), (partial(sample, mode=mode), args, (0, 1))
    yield ("copy_pages",), (copy_pages, (cache, _int32(COPY_ROOM), _int32(COPY_ROOM)), (0,))
    yield ("update_tables",), (update_tables, (slots, _int32(UPDATE_ROOM, 3)), (0,))
    number, flag = _int32(), jax.ShapeDtypeStruct((), jnp.bool_)
    history = (state, number, _int32(HISTORY_ROOM), number, flag)
    yield ("load_history",), (load_history, history, (0,))
    rules = (_int32(NUM_RULES), jax.ShapeDtypeStruct((NUM_RULES,), jnp.float32), _int32(NUM_RULES))
    yield ("load_rules",), (load_rules, (state, number, *rules), (0,))


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
