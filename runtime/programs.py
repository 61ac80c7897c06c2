"""Compiling every program of an engine ahead, and knowing what memory they take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.stages import Compiled

from paged.cache import PagedKVCache, copy_pages, read_pages, write_pages
from paged.models.stages import Stage
from paged.models.weights import PINNED
from paged.runtime.batch import SAMPLING_FIELDS
from paged.runtime.buckets import Bucket
from paged.runtime.compiler import Compiler, memory_to_run
from paged.runtime.lowering import Job, Key
from paged.runtime.placement import COPIED
from paged.runtime.sampler import SamplingMode, load_history, load_masks, load_rules, num_words
from paged.runtime.steps import (
    COPY_ROOM,
    HISTORY_ROOM,
    MASK_ROOM,
    MOVE_SHAPES,
    NUM_RULES,
    UPDATE_ROOM,
    StepShapes,
    forward,
    sample,
    score,
    take,
    update_tables,
)

_FEW_TOKENS = 16
_TAKE_PAGES = ("forward", "copy_pages", "read_pages", "write_pages")


class Programs:
    """Every compiled program of an engine, by kind and shape.

    Asking for one that was not compiled is a KeyError: nothing is ever compiled while serving.
    """

    def __init__(
        self, shapes: StepShapes, params: Any, compiler: Compiler, *, show_progress: bool
    ) -> None:
        """Compile everything; tell how it gets on if asked to."""
        jobs = all_jobs(shapes, abstract(params))
        self._compiled = compiler.programs(_fixed(shapes), jobs, show_progress=show_progress)

    def __getitem__(self, key: Key) -> Compiled:
        return self._compiled[key]


def step_memory(shapes: StepShapes, params: Any, compiler: Compiler) -> int:
    """Bytes of device memory that steps need beside parameters, state and pages.

    That of the largest programs, which is the same however many pages there will be. In each
    sampling mode XLA may find another way to be fastest for the product with the vocabulary, which
    takes other memory. Programs that take no pages are begun: they would be waited for later.
    """
    jobs = dict(all_jobs(shapes, abstract(params)))
    rows = shapes.buckets.max_num_seqs
    largest = (
        ("forward", Bucket(rows, rows, True)),
        ("forward", shapes.buckets.all()[0]),
        *(("sample", shapes.buckets.sampling[-1], mode) for mode in SamplingMode),
        ("score", shapes.buckets.mixed[-1]),
    )
    first, fixed = {key: jobs[key] for key in largest if key in jobs}, _fixed(shapes)
    compiler.begin(fixed, first.items())
    compiler.begin(fixed, ((key, job) for key, job in jobs.items() if key[0] not in _TAKE_PAGES))
    return memory_to_run(compiler.programs(fixed, first.items()).values())


def abstract(tree: Any) -> Any:
    """The shapes and dtypes of a pytree's arrays, and how they are shared among devices.

    On the default device there is nothing to share: the same whether the arrays exist yet or not.
    Which of them are in host memory is told in any case.
    """

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        shared = isinstance(sharding, NamedSharding)
        matters = shared or (sharding is not None and sharding.memory_kind == PINNED)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if matters else None)

    return jax.tree.map(shape_of, tree)


def _fixed(shapes: StepShapes) -> Any:
    """What all programs are specialised for, beside their arguments."""
    common = shapes.model, shapes.buckets, shapes.max_model_len, shapes.backend, shapes.tilings
    return common if shapes.stage is None else (*common, shapes.stage)


def all_jobs(shapes: StepShapes, params: Any) -> Iterator[tuple[Key, Job]]:
    """Every program, the slowest to compile first."""
    cache = shapes.placement.cache_shapes(shapes.cache)
    slots = jax.eval_shape(shapes.slot_state)
    state = jax.eval_shape(shapes.sampler_state)
    yield from _forward_jobs(shapes, params, cache, slots)
    if shapes.stage is None or shapes.stage.is_last:
        yield from _token_jobs(shapes, params, slots, state)
        yield from _sampler_jobs(shapes, state)
    elif shapes.stage.is_first:
        yield from _take_jobs(shapes, slots)
    yield from _page_jobs(shapes, cache)
    job = shapes.placement.job
    yield ("update_tables",), job(update_tables, (slots, _int32(UPDATE_ROOM, 3)), (0,))


def call_keys(shapes: StepShapes) -> tuple[Key, ...]:
    """What a device can be called with, in an order that is the same in all processes of it."""
    buckets = shapes.buckets
    return (
        *(("forward", bucket) for bucket in buckets.all()),
        *(("score", size) for size in buckets.scoring),
        *(("sample", rows, mode) for mode in SamplingMode for rows in buckets.sampling),
        *(("copy_pages",), ("update_tables",)),
        *(("load_history",), ("load_rules",), ("load_masks",), ("drain",)),
    )


def _forward_job(
    shapes: StepShapes, params: Any, cache: PagedKVCache, slots: Any, bucket: Bucket
) -> Job:
    place, stage = shapes.placement, shapes.stage
    step = partial(forward, shapes=shapes, bucket=bucket)
    args: tuple[Any, ...] = (params, cache, slots, _int32(shapes.layout(bucket).size))
    if stage is not None and not stage.is_first:
        args += (relay_shape(stage, bucket),)
    return place.job(step, args, (1, 2), out=(place.pages, COPIED, COPIED))


def relay_shape(stage: Stage, bucket: Bucket) -> jax.ShapeDtypeStruct:
    """The hidden states of a step, from stage to stage."""
    return jax.ShapeDtypeStruct((bucket.num_tokens, stage.hidden_size), stage.dtype)


def _forward_jobs(
    shapes: StepShapes, params: Any, cache: PagedKVCache, slots: Any
) -> Iterator[tuple[Key, Job]]:
    """What computes tokens.

    The slowest are the smallest steps on a GPU, where XLA tries many ways for each product, and
    then the largest.
    """
    for bucket in sorted(shapes.buckets.all(), key=lambda each: each.num_tokens > _FEW_TOKENS):
        yield ("forward", bucket), _forward_job(shapes, params, cache, slots, bucket)


def _token_jobs(
    shapes: StepShapes, params: Any, slots: Any, state: Any
) -> Iterator[tuple[Key, Job]]:
    """What scores and samples tokens."""
    place, cache = shapes.placement, shapes.placement.cache_shapes(shapes.cache)
    smallest = _forward_job(shapes, params, cache, slots, shapes.buckets.all()[-1])
    out = jax.eval_shape(smallest.function, *smallest.args)[2]
    for size in shapes.buckets.scoring:
        hidden = jax.ShapeDtypeStruct((size, out.last_hidden.shape[1]), out.last_hidden.dtype)
        scored = (params.without_layers, hidden, _int32(size))
        yield ("score", size), place.job(partial(score, shapes=shapes), scored)
    # Mode by mode, so that what the modes of a size have in common is tuned once for all of them.
    for mode in SamplingMode:
        for rows in reversed(shapes.buckets.sampling):
            kept = state if mode >= SamplingMode.ADJUSTED else None
            args = (params.without_layers, slots, kept, out.last_hidden, out.sampling)
            sampler = partial(sample, shapes=shapes, num_rows=rows, mode=mode)
            yield ("sample", rows, mode), place.job(sampler, args, (1, 2))


def _page_jobs(shapes: StepShapes, cache: PagedKVCache) -> Iterator[tuple[Key, Job]]:
    """What moves pages."""
    place, pairs = shapes.placement, _int32(COPY_ROOM)
    pages, read = place.pages, place.stacks
    yield ("copy_pages",), place.job(copy_pages, (cache, pairs, pairs), (0,), out=pages)
    for shape in MOVE_SHAPES if shapes.transit_room else ():
        stacks = place.shaped(jax.eval_shape(read_pages, cache, _int32(*shape)), read)
        yield ("read_pages", *shape), place.job(read_pages, (cache, _int32(*shape)), out=read)
        written = (cache, _int32(*shape), stacks)
        yield ("write_pages", *shape), place.job(write_pages, written, (0,), out=(pages, COPIED))


def _take_jobs(shapes: StepShapes, slots: Any) -> Iterator[tuple[Key, Job]]:
    """What takes tokens that another stage has chosen."""
    sampling = _int32(shapes.buckets.sampling[-1], len(SAMPLING_FIELDS))
    for rows in shapes.buckets.sampling:
        args = (slots, sampling, _int32(rows))
        yield ("take", rows), shapes.placement.job(partial(take, num_rows=rows), args, (0,))


def _sampler_jobs(shapes: StepShapes, state: Any) -> Iterator[tuple[Key, Job]]:
    """What tells the sampler of the sequences in slots."""
    job = shapes.placement.job
    number, flag = _int32(), jax.ShapeDtypeStruct((), jnp.bool_)
    history = (state, number, _int32(HISTORY_ROOM), number, flag)
    yield ("load_history",), job(load_history, history, (0,))
    rules = (_int32(NUM_RULES), jax.ShapeDtypeStruct((NUM_RULES,), jnp.float32), _int32(NUM_RULES))
    yield ("load_rules",), job(load_rules, (state, number, *rules), (0,))
    masks = _int32(MASK_ROOM, num_words(shapes.model.vocab_size))
    yield ("load_masks",), job(load_masks, (state, _int32(MASK_ROOM), masks), (0,))


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
