"""Tilings: picked by size, obeyed by the dispatch, and without any say in what is computed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from paged import attention
from paged.attention.tiling import (
    DecodeTiling,
    MosaicDecode,
    MosaicPrefill,
    PrefillTiling,
    Tilings,
    TritonDecode,
    TritonPrefill,
)
from paged.attention.tuning.candidates import decode_candidates, prefill_candidates
from paged.cache import Pages
from tests.paged.ragged import Row, Shape, check, heads_of, step

SHAPE = Shape(heads=6, dtype="bfloat16", num_rows=4, num_tokens=200, max_len=512)
MIXED = [Row(15, 1), Row(100, 150), Row(0, 2), Row(300, 1)]
DECODE = dataclasses.replace(SHAPE, num_rows=8, num_tokens=8)
LENGTHS = [Row(length - 1, 1) for length in (200, 1, 64, 65, 512, 129, 16)]


def test_a_tiling_is_picked_by_size() -> None:
    few, many = MosaicDecode(1), MosaicDecode(3)
    tilings = Tilings(decode=((8, few), (64, many)))
    assert [tilings.of_decode(rows) for rows in (1, 8, 9, 64, 1000)] == [few, few, many, many, many]
    assert tilings.of_prefill(1) is None


def test_rules_tell_shapes_apart() -> None:
    heads = heads_of(dataclasses.replace(SHAPE, head_dim=128))
    assert MosaicPrefill.default(heads).span == 128
    assert TritonPrefill.default(heads) == TritonPrefill(span=32, queries=128)
    assert TritonDecode.default(heads) == TritonDecode(span=64)
    narrow = heads_of(dataclasses.replace(SHAPE, head_dim=128, kv_dtype="int8"))
    assert TritonPrefill.default(narrow) == TritonPrefill(span=64, queries=64)
    wide = heads_of(dataclasses.replace(SHAPE, head_dim=256, dtype="float32"))
    assert TritonDecode.default(wide) == TritonDecode(span=16, warps=8)
    assert MosaicPrefill.default(wide).span == 64


def text_of(tilings: Tilings) -> str:
    """The program of a mixed step on Hopper, traced."""
    shape = dataclasses.replace(SHAPE, head_dim=128)
    tokens = jax.ShapeDtypeStruct((shape.num_tokens, shape.heads, shape.head_dim), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((shape.num_tokens, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((shape.num_rows,), jnp.int32)
    tables = jax.ShapeDtypeStruct((shape.num_slots, shape.pages_per_table), jnp.int32)
    pages = jax.eval_shape(lambda: Pages.zeros(shape.spec))
    function = step(shape, "mosaic", False, tilings)
    return str(function.trace(tokens, new, new, pages, tables, row, row, row, None).jaxpr)


def test_the_dispatch_runs_what_was_measured() -> None:
    by_rule = text_of(Tilings())
    assert "paged_prefill_mosaic" in by_rule
    triton = text_of(Tilings(((1, TritonDecode(64)),), ((1, TritonPrefill(32, 64)),)))
    assert "paged_prefill_mosaic" not in triton
    assert "paged_prefill" in triton
    half = text_of(Tilings(decode=((1, TritonDecode(64)),)))
    assert "paged_prefill_mosaic" in half
    assert half != by_rule
    assert text_of(Tilings(prefill=((1, MosaicPrefill(64)),))) != by_rule
    assert text_of(Tilings(((1, MosaicDecode()),), ((1, MosaicPrefill(128)),))) == by_rule


def test_one_backend_does_not_obey_what_was_measured_of_another() -> None:
    tilings = Tilings(((1, MosaicDecode()),), ((1, MosaicPrefill(64)),))
    check(SHAPE, MIXED, "triton", tilings=tilings)


def check_tiling(shape: Shape, tiling: DecodeTiling | PrefillTiling) -> None:
    if isinstance(tiling, TritonDecode):
        shape = dataclasses.replace(shape, num_rows=8, num_tokens=8)
        decode = Tilings(decode=((1, tiling),))
        check(shape, LENGTHS, "triton", decode_only=True, tilings=decode)
    elif isinstance(tiling, TritonPrefill):
        check(shape, MIXED, "triton", tilings=Tilings(prefill=((1, tiling),)))


@pytest.mark.parametrize(
    "tiling",
    [TritonDecode(span=128, programs=1024, warps=8), TritonPrefill(span=64, queries=64, warps=4)],
    ids=["decode", "prefill"],
)
def test_a_tiling_changes_nothing(tiling: DecodeTiling | PrefillTiling) -> None:
    check_tiling(SHAPE, tiling)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"head_dim": 128}, {"kv_dtype": "int8", "window": 90}])
@pytest.mark.parametrize("place", range(12))
def test_no_candidate_changes_anything(options: dict[str, int], place: int) -> None:
    shape = Shape(**{**dataclasses.asdict(SHAPE), **options})
    heads = heads_of(shape)
    for candidates in (
        decode_candidates(heads, mosaic=False),
        prefill_candidates(heads, mosaic=False),
    ):
        assert len(candidates) <= 12
        for tiling in candidates[place : place + 1]:
            check_tiling(shape, tiling)


def test_every_backend_with_kernels_has_candidates() -> None:
    heads = heads_of(dataclasses.replace(SHAPE, head_dim=128))
    for mosaic in (False, True):
        decode = decode_candidates(heads, mosaic=mosaic)
        assert decode[0] == (MosaicDecode if mosaic else TritonDecode).default(heads)
        prefill = prefill_candidates(heads, mosaic=mosaic)
        assert prefill[0] == (MosaicPrefill if mosaic else TritonPrefill).default(heads)
        for candidates in (decode, prefill):
            assert len(set(candidates)) == len(candidates) > 3
    assert set(attention.BACKENDS) == {"xla", "triton", "mosaic"}
