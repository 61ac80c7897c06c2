"""Attention over pages against float64, for every backend that this machine can run."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.paged.ragged import Row, Shape, check

BACKENDS = ("xla", "triton")
STEP = Shape()
DECODE = Shape(num_rows=12, num_tokens=12)
# Lengths around the ends of pages (16), spans (32, 64, 128) and tiles (64, 128).
EDGES = (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 200, 640)
MIXED = (Row(15, 1), Row(0, 1), Row(37, 1), Row(0, 129), Row(150, 70), Row(64, 64), Row(300, 2))

backends = pytest.mark.parametrize("backend", BACKENDS)


@backends
def test_a_decode_row_sees_its_whole_sequence(backend: str) -> None:
    check(DECODE, [Row(length - 1, 1) for length in EDGES], backend, decode_only=True)


@backends
def test_decode_rows_of_a_mixed_step_see_the_same(backend: str) -> None:
    check(STEP, [Row(length - 1, 1) for length in EDGES[: STEP.num_rows]], backend)


@backends
@pytest.mark.parametrize("rows", [[], [Row(0, 1)], [Row(639, 1)] * 3], ids=("none", "one", "three"))
def test_padding_rows_change_nothing(backend: str, rows: list[Row]) -> None:
    check(DECODE, rows, backend, decode_only=True)


@backends
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([Row(0, 512)], id="one whole prompt"),
        pytest.param([Row(0, n) for n in (2, 16, 17, 63, 64, 65, 127, 128)], id="short prompts"),
        pytest.param([Row(128, 128), Row(0, 129), Row(511, 129), Row(1, 2)], id="later chunks"),
        pytest.param(MIXED, id="chunks and decode rows"),
        pytest.param([Row(n, 1 + n % 2) for n in range(10)], id="alternating"),
        pytest.param([], id="nothing"),
    ],
)
def test_chunks_see_their_context_and_themselves(backend: str, rows: list[Row]) -> None:
    check(STEP, rows, backend)


SHAPES = {
    "one head per group": Shape(heads=2, kv_heads=2, page_size=8),
    "7 heads per group": Shape(heads=14, kv_heads=2, head_dim=80, page_size=32),
    "group of 20 is shared out": Shape(heads=20, kv_heads=1, head_dim=96),
    "more heads than programs": Shape(heads=64, kv_heads=64, head_dim=16),
    "large heads, large pages": Shape(heads=2, kv_heads=1, head_dim=256, page_size=128),
    "192 in bfloat16": Shape(heads=8, kv_heads=2, head_dim=192, dtype="bfloat16"),
    "bfloat16": Shape(heads=16, kv_heads=1, head_dim=128, page_size=32, dtype="bfloat16"),
    "window of a token": Shape(window=1),
    "window within a page": Shape(window=7, page_size=64),
    "window of a span": Shape(window=64, head_dim=80),
    "window beyond all": Shape(window=2000),
    "sinks": Shape(heads=12, sinks=True),
    "sinks, window and soft cap": Shape(sinks=True, window=100, soft_cap=5.0, dtype="bfloat16"),
    "fp8": Shape(kv_dtype="fp8", head_dim=80),
    "fp8 e5m2": Shape(kv_dtype="fp8_e5m2", dtype="float16"),
    "fp8 beside bfloat16": Shape(kv_dtype="fp8", dtype="bfloat16", heads=16, window=100),
    "int8": Shape(kv_dtype="int8", soft_cap=3.0, sinks=True),
    "int8 beside bfloat16": Shape(kv_dtype="int8", dtype="bfloat16", head_dim=128, page_size=64),
    "int8 beside float16": Shape(kv_dtype="int8", dtype="float16", window=30),
    "soft cap": Shape(soft_cap=3.0),
    "latents": Shape(heads=6, kv_heads=1, head_dim=40, latent_rank=24, page_size=8),
    "latents of DeepSeek": Shape(
        heads=16, kv_heads=1, head_dim=576, latent_rank=512, dtype="bfloat16"
    ),
    "latents for 128 heads": Shape(
        heads=128, kv_heads=1, head_dim=80, latent_rank=64, page_size=32, dtype="bfloat16"
    ),
    "window and soft cap": Shape(window=100, soft_cap=20.0, heads=6, dtype="bfloat16"),
}


@backends
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_gives_the_same_attention(backend: str, shape: Shape) -> None:
    check(shape, MIXED, backend)


@backends
def test_where_the_pages_lie_changes_nothing(backend: str) -> None:
    for seed in range(3):
        check(STEP, MIXED, backend, seed=seed)


def rows_that_fit(shape: Shape) -> st.SearchStrategy[list[Row]]:
    """Any rows that a step of this shape holds."""
    row = st.builds(
        Row, context=st.integers(0, 300), query=st.one_of(st.just(1), st.integers(1, 300))
    )

    def fits(rows: list[Row]) -> bool:
        return sum(row.query for row in rows) <= shape.num_tokens

    return st.lists(row, max_size=shape.num_rows).filter(fits)


@backends
@pytest.mark.parametrize("window", [None, 40])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(data=st.data())
def test_any_mix_of_rows(backend: str, window: int | None, data: st.DataObject) -> None:
    shape = dataclasses.replace(STEP, window=window)
    check(shape, data.draw(rows_that_fit(shape)), backend)


@pytest.mark.slow
@backends
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4, 5, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sweep(backend: str, page_size: int, head_dim: int, group: int, dtype: str) -> None:
    shape = Shape(heads=2 * group, kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype)
    check(shape, MIXED, backend)
