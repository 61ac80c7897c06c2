"""The kernels compiled and run on a GPU, at small shapes and at those of an 8B model."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from paged.attention import default_backend
from paged.attention.tiling import Tilings
from paged.attention.tuning.search import fastest, search
from paged.attention.tuning.timer import GpuTimer
from paged.attention.tuning.workloads import Case, Layer, Workload, cases
from tests.paged.ragged import Row, Shape, check, make_batch, run
from tests.paged.test_attention import DECODE, EDGES, MIXED, SHAPES, STEP

pytestmark = [
    pytest.mark.gpu,
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

LLAMA = Shape(heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
BATCH_32 = dataclasses.replace(LLAMA, num_rows=32, num_tokens=32, max_len=1024)
CHUNK = dataclasses.replace(LLAMA, num_rows=32, num_tokens=2048, max_len=8192)


def skip_unless_it_runs(backend: str) -> None:
    if backend == "mosaic" and jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("backend", ["xla", "triton", "mosaic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [STEP, *SHAPES.values()], ids=["step", *SHAPES])
def test_small_shapes(backend: str, dtype: str, shape: Shape) -> None:
    skip_unless_it_runs(backend)
    check(dataclasses.replace(shape, dtype=dtype), MIXED, backend)


@pytest.mark.parametrize("backend", ["xla", "triton", "mosaic"])
def test_decode_only(backend: str) -> None:
    skip_unless_it_runs(backend)
    check(DECODE, [Row(length - 1, 1) for length in EDGES], backend, decode_only=True)


HALF = Shape(kv_heads=1, dtype="bfloat16")
DECODES = (
    dataclasses.replace(HALF, heads=1, page_size=8),
    dataclasses.replace(HALF, heads=9, kv_heads=3, page_size=128),
    dataclasses.replace(HALF, heads=32, kv_heads=8, head_dim=128),
    dataclasses.replace(HALF, heads=7, head_dim=192, page_size=8),
    dataclasses.replace(HALF, heads=8, head_dim=256, page_size=128),
    dataclasses.replace(HALF, heads=32, kv_heads=2, head_dim=128, page_size=8),
    dataclasses.replace(HALF, heads=4, head_dim=128, window=1),
    dataclasses.replace(HALF, heads=64, kv_heads=8, window=128, sinks=True),
    dataclasses.replace(HALF, heads=8, kv_heads=4, head_dim=256, window=100, soft_cap=9.0),
    dataclasses.replace(HALF, heads=3, page_size=128, window=70, soft_cap=9.0, sinks=True),
    dataclasses.replace(HALF, heads=32, kv_heads=8, head_dim=128, dtype="float16"),
    dataclasses.replace(HALF, heads=16, head_dim=576, latent_rank=512),
    dataclasses.replace(HALF, heads=5, head_dim=576, latent_rank=512, page_size=8),
    dataclasses.replace(HALF, heads=16, head_dim=192, latent_rank=128, page_size=128),
    dataclasses.replace(HALF, heads=128, head_dim=576, latent_rank=512),
)


@pytest.mark.parametrize("shape", DECODES, ids=str)
@pytest.mark.parametrize("padding", [0, 20])
def test_decode_by_the_default_backend(shape: Shape, padding: int) -> None:
    num_rows = len(EDGES) + padding
    shape = dataclasses.replace(shape, num_rows=num_rows, num_tokens=num_rows)
    rows = [Row(length - 1, 1) for length in EDGES]
    check(shape, rows, default_backend(jax.devices()[0]), decode_only=True)


@pytest.mark.parametrize("num_rows", [0, 17, 1000])
def test_decode_of_many_rows_by_the_default_backend(num_rows: int) -> None:
    shape = dataclasses.replace(HALF, heads=4, num_rows=1024, num_tokens=1024, max_len=256)
    rows = [Row(37 * n % 256, 1) for n in range(num_rows)]
    check(shape, rows, default_backend(jax.devices()[0]), decode_only=True)


HOPPER = (
    dataclasses.replace(HALF, heads=1, page_size=8),
    dataclasses.replace(HALF, heads=2, head_dim=128, page_size=128),
    dataclasses.replace(HALF, heads=4, kv_heads=2, head_dim=192, page_size=64),
    dataclasses.replace(HALF, heads=8, head_dim=256, page_size=128),
    dataclasses.replace(HALF, heads=12, window=1),
    dataclasses.replace(HALF, heads=24, head_dim=256, window=128, soft_cap=30.0),
    dataclasses.replace(HALF, heads=20, window=100, sinks=True),
    dataclasses.replace(LLAMA, dtype="float16"),
)


@pytest.mark.parametrize("shape", HOPPER, ids=str)
@pytest.mark.parametrize("rows", [MIXED, [Row(n, 8 * n + 2) for n in range(10)]], ids=["a", "b"])
def test_mosaic_shapes(shape: Shape, rows: list[Row]) -> None:
    skip_unless_it_runs("mosaic")
    check(shape, rows, "mosaic")


LONG = (
    *([Row(30_000, query)] for query in (2, 16, 64, 300)),
    [Row(20, 1), Row(20_000, 90), Row(0, 100), Row(9_000, 33), Row(31_999, 1)],
)


@pytest.mark.parametrize("kv_dtype", [None, "fp8", "int8"])
@pytest.mark.parametrize(
    "shape", [*HOPPER, dataclasses.replace(HALF, heads=32, window=9000)], ids=str
)
def test_mosaic_splits_long_contexts(shape: Shape, kv_dtype: str | None) -> None:
    skip_unless_it_runs("mosaic")
    shape = dataclasses.replace(
        shape, kv_dtype=kv_dtype, num_tokens=300, num_rows=5, max_len=32_000
    )
    for rows in LONG:
        check(shape, rows, "mosaic")


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("shape", HOPPER, ids=str)
def test_mosaic_over_pages_of_8_bits(shape: Shape, kv_dtype: str) -> None:
    skip_unless_it_runs("mosaic")
    shape = dataclasses.replace(shape, kv_dtype=kv_dtype)
    check(shape, MIXED, "mosaic")
    decode = dataclasses.replace(shape, num_rows=len(EDGES), num_tokens=len(EDGES))
    check(decode, [Row(length - 1, 1) for length in EDGES], "mosaic", decode_only=True)


def difference(shape: Shape, rows: list[Row], backend: str, decode_only: bool) -> float:
    """Norm of a backend's error against the reference in float32, relative to the output's."""
    batch = make_batch(shape, rows)
    tokens = sum(row.query for row in rows)
    out, _ = run(shape, batch, backend, decode_only)
    precise, _ = run(dataclasses.replace(shape, dtype="float32"), batch, "xla", decode_only)
    error = np.linalg.norm(out[:tokens] - precise[:tokens])
    return float(error / np.linalg.norm(precise[:tokens]))


@pytest.mark.parametrize(
    ("backend", "dtype", "limit"),
    [("triton", "bfloat16", 4e-3), ("triton", "float32", 1e-5), ("mosaic", "bfloat16", 4e-3)],
)
def test_32_sequences_of_1024_tokens(backend: str, dtype: str, limit: float) -> None:
    skip_unless_it_runs(backend)
    shape = dataclasses.replace(BATCH_32, dtype=dtype)
    assert difference(shape, [Row(1023, 1)] * 32, backend, decode_only=True) < limit


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_few_long_rows_among_many(backend: str) -> None:
    skip_unless_it_runs(backend)
    shape = dataclasses.replace(LLAMA, num_rows=64, num_tokens=64, max_len=16384)
    rows = [Row(16383, 1), Row(9000, 1), *[Row(n, 1) for n in range(60)]]
    assert difference(shape, rows, backend, decode_only=True) < 4e-3


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_one_very_long_row(backend: str) -> None:
    skip_unless_it_runs(backend)
    shape = dataclasses.replace(LLAMA, num_rows=1, num_tokens=1, max_len=16384)
    assert difference(shape, [Row(16383, 1)], backend, decode_only=True) < 4e-3


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_chunks_of_2048_tokens_beside_decode_rows(backend: str) -> None:
    skip_unless_it_runs(backend)
    rows = [Row(6000, 1500), *[Row(1000 + n, 1) for n in range(28)], Row(0, 300), Row(77, 200)]
    assert difference(CHUNK, rows, backend, decode_only=False) < 4e-3


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_a_chunk_beside_decode_rows_over_pages_of_8_bits(backend: str, kv_dtype: str) -> None:
    skip_unless_it_runs(backend)
    shape = dataclasses.replace(CHUNK, kv_dtype=kv_dtype)
    rows = [Row(6000, 1500), *[Row(1000 + n, 1) for n in range(28)], Row(0, 300), Row(77, 200)]
    assert difference(shape, rows, backend, decode_only=False) < 5e-3


def layer_of(shape: Shape) -> Layer:
    backend = default_backend(jax.devices()[0])
    return Layer(shape.heads, shape.spec, jax.numpy.dtype(shape.dtype), backend)


@pytest.mark.parametrize("shape", [LLAMA, HALF], ids=["128", "64"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("place", range(12))
def test_no_candidate_changes_anything(shape: Shape, decode: bool, place: int) -> None:
    layer = layer_of(shape)
    candidates = Case(decode, 1, (Workload(1, 1, 0),)).candidates(layer)
    assert len(candidates) <= 12
    for tiling in candidates[place : place + 1]:
        tilings = Tilings(((1, tiling),)) if decode else Tilings(prefill=((1, tiling),))  # type: ignore[arg-type]
        try:
            check(shape, MIXED, layer.backend, tilings=tilings)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if "hared memory" not in str(error):
                raise
            pytest.skip(f"this GPU has too little memory for {tiling}")


def test_the_search_times_what_it_compiles() -> None:
    layer = layer_of(LLAMA)
    timer = GpuTimer(layer, pool_bytes=2**28)
    try:
        found = search(layer, cases(8, 512, 2048), timer, seconds=30, advance=lambda _: None)
    finally:
        timer.close()
    assert all(
        0 < time < 1e5 for of_case in found.values() for times in of_case.values() for time in times
    )
    assert fastest(layer, found).decode
