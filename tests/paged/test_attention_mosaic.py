"""The Mosaic GPU kernels, run warpgroup by warpgroup in its interpreter."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged import attention
from paged.attention import AttentionMetadata, Scoring
from paged.attention.mosaic import TILE_SIZE, decode, mosaic_decode, mosaic_prefill, prefill, splits
from paged.attention.tiling import (
    DecodeTiling,
    Heads,
    MosaicDecode,
    MosaicPrefill,
    PrefillTiling,
    Tilings,
)
from paged.attention.tuning.candidates import decode_candidates, prefill_candidates
from paged.cache import Pages, as_stored
from tests.paged.ragged import Row, Shape, check, heads_of

SHAPE = Shape(heads=4, kv_heads=1, dtype="bfloat16", num_rows=4, num_tokens=300, max_len=512)
MIXED = [Row(15, 1), Row(100, 200), Row(0, 2), Row(300, 33)]
DECODE = dataclasses.replace(SHAPE, num_rows=8, num_tokens=8)
LENGTHS = [Row(length - 1, 1) for length in (200, 1, 64, 65, 512, 129, 16)]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is interpreted, in few programs, so that each has several pieces or rows."""
    backend = attention.Backend(interpreted_decode, interpreted_prefill, TILE_SIZE)
    monkeypatch.setitem(attention.BACKENDS, "interpreted", lambda: backend)
    monkeypatch.setattr(prefill, "MULTIPROCESSORS", 1)
    monkeypatch.setattr(decode, "MULTIPROCESSORS", 2)


def interpreted_decode(
    q: jax.Array,
    pages: Pages,
    lengths: jax.Array,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    if decode.obstacle(q, pages):
        return attention.BACKENDS["xla"]().decode(q, pages, lengths, meta, scoring, sinks)
    tiling = meta.tilings.of_decode(len(q)) or MosaicDecode()
    assert isinstance(tiling, MosaicDecode)
    interpret = plgpu.InterpretGPUParams()
    return mosaic_decode(
        q, pages, lengths, meta, scoring, sinks, tiling=tiling, interpret=interpret
    )


def interpreted_prefill(
    q: jax.Array,
    pages: Pages,
    meta: AttentionMetadata,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    tiling = meta.tilings.of_prefill(len(q))
    tiling = tiling or replace(MosaicPrefill.default(Heads.of(q, pages)), programs=3)
    assert isinstance(tiling, MosaicPrefill)
    interpret = plgpu.InterpretGPUParams()
    return mosaic_prefill(q, pages, meta, scoring, sinks, tiling=tiling, interpret=interpret)


def test_decode_rows_see_their_whole_sequence() -> None:
    check(DECODE, LENGTHS, "interpreted", decode_only=True)


@pytest.mark.parametrize("rows", [[], [Row(0, 1)], [Row(511, 1)]], ids=("none", "one", "long"))
def test_padding_rows_change_nothing(rows: list[Row]) -> None:
    check(DECODE, rows, "interpreted", decode_only=True)


def test_decode_of_a_window_with_sinks_and_a_soft_cap() -> None:
    shape = dataclasses.replace(
        DECODE, heads=6, kv_heads=2, page_size=8, window=90, sinks=True, soft_cap=10.0
    )
    check(shape, LENGTHS, "interpreted", decode_only=True)


@pytest.mark.parametrize("page_size", [8, 16, 128])
def test_decode_of_latents(page_size: int) -> None:
    shape = dataclasses.replace(
        DECODE, heads=5, kv_heads=1, head_dim=192, latent_rank=128, page_size=page_size
    )
    check(shape, LENGTHS, "interpreted", decode_only=True)


def test_chunks_see_their_context_and_themselves() -> None:
    check(SHAPE, MIXED, "interpreted")


def test_a_window_over_large_pages_and_a_soft_cap() -> None:
    shape = dataclasses.replace(SHAPE, heads=3, page_size=64, window=90, soft_cap=10.0)
    check(shape, MIXED, "interpreted")


def test_sinks() -> None:
    check(dataclasses.replace(SHAPE, heads=12, sinks=True), MIXED, "interpreted")


def test_nothing_to_do() -> None:
    check(SHAPE, [Row(15, 1)], "interpreted")


LONG = [Row(5, 1), Row(1500, 20), Row(0, 40)]
"""Of which the second is split, where there are enough programs."""


def check_splits(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """What is computed is the same, and something is split."""
    monkeypatch.setattr(prefill, "MULTIPROCESSORS", 16)
    counts: list[int] = []

    def split_tiles(*args: Any) -> splits.SplitStep:
        found = splits.split_tiles(*args)
        jax.debug.callback(lambda count: counts.append(int(count[0])), found.num_merges)
        return found

    monkeypatch.setattr(prefill, "split_tiles", split_tiles)
    tiling = Tilings(prefill=((1, MosaicPrefill(span=64, programs=3)),))
    shape = replace(shape, max_len=1600, num_tokens=100)
    check(shape, LONG, "interpreted", tilings=tiling)
    jax.effects_barrier()
    assert counts == [1]


def test_long_contexts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    check_splits(monkeypatch, replace(SHAPE, window=1300, sinks=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 1, "page_size": 8, "window": 1300},
        {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_size": 128},
        {"heads": 7, "head_dim": 256, "soft_cap": 30.0},
        {"heads": 24, "kv_heads": 2, "head_dim": 192, "sinks": True},
        {"dtype": "float16", "kv_dtype": "int8", "head_dim": 128},
        {"kv_dtype": "fp8"},
    ],
    ids=str,
)
def test_sweep_of_split_contexts(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    check_splits(monkeypatch, Shape(**{**dataclasses.asdict(SHAPE), **options}))


def test_decode_over_pages_of_8_bits() -> None:
    shape = replace(DECODE, heads=6, kv_heads=2, page_size=8, kv_dtype="fp8")
    check(
        replace(shape, window=90, sinks=True, soft_cap=10.0),
        LENGTHS,
        "interpreted",
        decode_only=True,
    )


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_chunks_over_pages_of_8_bits(kv_dtype: str) -> None:
    check(replace(SHAPE, kv_dtype=kv_dtype, page_size=64, window=90), MIXED, "interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_decode_sweep_over_pages_of_8_bits(kv_dtype: str, head_dim: int) -> None:
    shape = replace(DECODE, heads=6, kv_heads=2, page_size=128, head_dim=head_dim)
    check(replace(shape, kv_dtype=kv_dtype), LENGTHS, "interpreted", decode_only=True)


def check_tiling(shape: Shape, tiling: DecodeTiling | PrefillTiling) -> None:
    """What is computed does not depend on it."""
    if isinstance(tiling, MosaicDecode):
        decode = Tilings(decode=((1, tiling),))
        shape = replace(shape, num_rows=8, num_tokens=8)
        check(shape, LENGTHS, "interpreted", decode_only=True, tilings=decode)
    elif isinstance(tiling, MosaicPrefill):
        check(shape, MIXED, "interpreted", tilings=Tilings(prefill=((1, tiling),)))


def test_a_decode_tiling_changes_nothing() -> None:
    check_tiling(DECODE, MosaicDecode(residents=3, ring=49152))


def test_a_prefill_tiling_changes_nothing() -> None:
    check_tiling(SHAPE, MosaicPrefill(span=64, stages=3, programs=2))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("place", range(12))
def test_no_candidate_changes_anything(head_dim: int, place: int) -> None:
    shape = replace(SHAPE, head_dim=head_dim)
    heads = heads_of(shape)
    for candidates in (
        decode_candidates(heads, mosaic=True),
        prefill_candidates(heads, mosaic=True),
    ):
        assert len(candidates) <= 12
        for tiling in candidates[place : place + 1]:
            check_tiling(shape, tiling)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 1, "page_size": 8},
        {"heads": 2, "head_dim": 128, "page_size": 128},
        {"heads": 4, "kv_heads": 2, "head_dim": 192, "page_size": 64},
        {"heads": 8, "head_dim": 256, "page_size": 128},
        {"heads": 16, "page_size": 32},
        {"heads": 7, "window": 5},
        {"heads": 12, "window": 1},
        {"heads": 24, "window": 128, "head_dim": 256, "soft_cap": 30.0},
        {"dtype": "float16"},
        {"kv_dtype": "fp8", "head_dim": 128, "page_size": 8},
        {"kv_dtype": "fp8_e5m2", "head_dim": 192, "window": 5},
        {"kv_dtype": "int8", "head_dim": 256, "page_size": 128, "dtype": "float16"},
    ],
    ids=str,
)
def test_sweep(options: dict[str, int]) -> None:
    check(Shape(**{**dataclasses.asdict(SHAPE), **options}), MIXED, "interpreted")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "prompts", "decoding"),
    [
        ("bfloat16", None, 128, True, True),
        ("float16", None, 64, True, True),
        ("float32", None, 128, False, False),
        ("bfloat16", "float32", 128, False, False),
        ("bfloat16", "float8_e4m3fn", 128, True, True),
        ("float16", "float8_e5m2", 64, True, True),
        ("float32", "float8_e4m3fn", 128, False, False),
        ("bfloat16", "int8", 128, True, False),
        ("bfloat16", None, 80, False, False),
        ("bfloat16", "float8_e4m3fn", 80, False, False),
        ("bfloat16", None, 320, False, False),
    ],
)
def test_what_it_leaves_to_triton(
    dtype: str, kv_dtype: str | None, head_dim: int, prompts: bool, decoding: bool
) -> None:
    q = jnp.zeros((2, 2, head_dim), dtype)
    pages = as_stored(jnp.zeros((1, 16, 2, head_dim)), jnp.dtype(kv_dtype or dtype))
    assert (prefill.obstacle(q, pages) is None) is prompts
    assert (decode.obstacle(q, pages) is None) is decoding
