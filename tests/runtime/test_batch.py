"""Buckets and packing: what the host writes is what the device reads."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from paged.runtime.batch import ON_DEVICE, Layout, SlotSampling, pack, unpack, unpack_sampling
from paged.runtime.buckets import Bucket, Buckets
from paged.runtime.plan import PageUpdate, Row, StepPlan
from paged.runtime.sequence import Sequence, SequenceLimits

NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def make_plan(*rows: Row, updates: tuple[PageUpdate, ...] = ()) -> StepPlan:
    return StepPlan(rows=rows, admitted=(), page_updates=updates, copies=())


def make_row(length: int, *, start: int = 0, slot: int = 0, outputs: int = 0) -> Row:
    prompt = list(range(100, 100 + start + length - outputs))
    sequence = Sequence(0, prompt, SequenceLimits(max_tokens=64))
    sequence.outputs = list(range(500, 500 + outputs))
    return Row(sequence, slot, start, length, samples=True)


@given(st.integers(1, 1500), st.integers(1, 9000))
def test_every_step_fits_a_bucket(seqs: int, tokens: int) -> None:
    buckets = Buckets.make(seqs, max(tokens, seqs))
    assert buckets.decode[-1] == buckets.max_num_seqs == seqs
    assert buckets.mixed[-1] == max(tokens, seqs)
    for bucket in buckets.all():
        assert bucket.num_rows <= min(bucket.num_tokens, seqs)
        assert bucket.num_rows <= buckets.sampling_rows(bucket.num_rows) <= seqs


@given(st.integers(1, 1024))
def test_the_smallest_shape_that_holds_a_step_is_taken(rows: int) -> None:
    buckets = Buckets.make(1024, 8192)
    plan = make_plan(*[make_row(1, slot=i) for i in range(rows)])
    size = buckets.pick(plan, scores_prompt=False).num_rows
    assert size == min(size for size in buckets.decode if size >= rows)
    assert size <= 2 * rows


@given(st.integers(1, 1024), st.integers(1, 8192))
def test_a_step_that_scores_has_a_scoring_program(seqs: int, tokens: int) -> None:
    buckets = Buckets.make(seqs, 8192)
    bucket = buckets.pick(make_plan(make_row(tokens)), scores_prompt=True)
    assert bucket in buckets.all()
    assert bucket.num_tokens == min(size for size in buckets.scoring if size >= tokens)


def test_shapes_beyond_the_usual_ones_double() -> None:
    buckets = Buckets.make(5000, 20_000)
    assert buckets.decode[-3:] == (2048, 4096, 5000)
    assert buckets.mixed[-3:] == (8192, 16_384, 20_000)
    assert buckets.sampling[-3:] == (2048, 4096, 5000)
    assert Buckets.make(1, 1) == Buckets((1,), (1,), (1,))


def test_lone_rows_are_padded_where_they_are_slow() -> None:
    buckets = Buckets.make(5, 16, fewest_rows=2)
    assert buckets.decode == (2, 4, 5)
    assert buckets.sampling == (2, 5)
    assert Buckets.make(1, 16, fewest_rows=2) == Buckets((1,), (16,), (2,))


def test_an_eighth_of_a_thousand_programs_is_too_many() -> None:
    """Start-up compiles one large program a bucket, and one a mode and size of sampling."""
    buckets = Buckets.make(1024, 8192, fewest_rows=2)
    assert len(buckets.all()) <= 32
    assert len(buckets.sampling) <= 12
    assert len(Buckets.make(32, 512).all()) <= 12


def test_a_step_that_scores_its_prompt_is_never_decode_only() -> None:
    buckets = Buckets.make(8, 64)
    plan = make_plan(make_row(1))
    assert buckets.pick(plan, scores_prompt=False) == Bucket(1, 1, True)
    assert not buckets.pick(plan, scores_prompt=True).decode_only


def test_a_packed_step_reads_as_it_was_planned() -> None:
    decode = make_row(1, start=30, slot=5, outputs=0)
    decode = replace(decode, start=31)  # its newest token is known to the device alone
    chunk = make_row(7, start=4, slot=2)
    updates = (PageUpdate(2, 0, 77), PageUpdate(5, 1, 78))
    layout = Layout.make(Bucket(16, 4, False), page_size=16)
    table = SlotSampling(8)
    table.set(5, seed=2**63 + 5, top_k=40, floats={**NEUTRAL, "temperature": 0.7})
    table.set(2, seed=-1, top_k=9, floats={**NEUTRAL, "top_p": 0.25})

    packed = jax.device_put(pack(make_plan(decode, chunk, updates=updates), layout, table))
    batch = unpack(packed, layout)
    assert batch.tokens.tolist() == [ON_DEVICE, *range(104, 111), *[0] * 8]
    assert batch.slots.tolist() == [5, 2, 0, 0]
    assert batch.query_len.tolist() == [1, 7, 0, 0]
    assert batch.context_len.tolist() == [31, 4, 0, 0]
    assert batch.updates[:2].tolist() == [[2, 0, 77], [5, 1, 78]]
    assert (batch.updates[2:, 0] >= 8).all(), "padding must not touch a slot"

    rows = unpack_sampling(batch.sampling)
    assert rows.samples.tolist() == [True, True, False, False]
    assert rows.seed.tolist()[:2] == [[2**31, 5], [2**32 - 1, 2**32 - 1]]
    assert rows.top_k.tolist()[:2] == [40, 9]
    assert rows.output_index.tolist()[:2] == [1, 0]
    np.testing.assert_allclose(rows.temperature[:2], [0.7, 1.0])
    np.testing.assert_allclose(rows.top_p[:2], [1.0, 0.25])


def test_more_updates_than_a_step_has_room_for_do_not_fit() -> None:
    layout = Layout.make(Bucket(1, 1, True), page_size=16)
    updates = tuple(PageUpdate(0, i, i) for i in range(layout.num_updates + 1))
    with pytest.raises(ValueError, match="broadcast"):
        pack(make_plan(make_row(1), updates=updates), layout, SlotSampling(1))
