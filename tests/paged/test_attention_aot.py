"""The kernels compile for an H200, in registers, without copying the pages, on any machine."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from paged.cache import Pages
from tests.paged import aot
from tests.paged.ragged import Shape, step

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]"),
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

MIXED = Shape(heads=32, kv_heads=8, dtype="bfloat16", num_rows=64, num_tokens=512, max_len=4096)
DECODE = dataclasses.replace(MIXED, num_tokens=64)
# DeepSeek-V2-Lite's; the large models have 128 heads.
LATENTS = dataclasses.replace(MIXED, heads=16, kv_heads=1, head_dim=576, latent_rank=512)


def compiled(shape: Shape, backend: str = "triton") -> jax.stages.Compiled:
    """One layer's attention for a shape, its pages donated."""
    vector = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens = functools.partial(jax.ShapeDtypeStruct, dtype=shape.dtype)
    return aot.compile_for_h200(
        step(shape, backend, decode_only=shape.num_tokens == shape.num_rows),
        tokens((shape.num_tokens, shape.heads, shape.head_dim)),
        tokens((shape.num_tokens, shape.kv_heads, shape.head_dim)),
        tokens((shape.num_tokens, shape.kv_heads, shape.head_dim)),
        jax.eval_shape(lambda: Pages.zeros(shape.spec)),
        vector((shape.num_slots, shape.pages_per_table)),
        vector((shape.num_rows,)),
        vector((shape.num_rows,)),
        vector((shape.num_rows,)),
        jax.ShapeDtypeStruct((shape.heads,), jnp.float32) if shape.sinks else None,
        donate=(3,),
    )


@pytest.mark.parametrize("shape", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("kv_dtype", [None, "fp8", "int8"])
def test_pages_are_updated_in_place_and_nothing_loops_over_the_host(
    shape: Shape, kv_dtype: str | None
) -> None:
    shape = dataclasses.replace(shape, kv_dtype=kv_dtype)
    program = compiled(shape)
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < shape.spec.num_pages * shape.spec.bytes_per_page // 8
    text = program.as_text()
    assert text is not None
    assert "paged_decode" in text
    assert " while(" not in text


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_mosaic_reads_pages_of_8_bits_where_they_are(kv_dtype: str) -> None:
    shape = dataclasses.replace(MIXED, head_dim=128, kv_dtype=kv_dtype)
    program = compiled(shape, "mosaic")
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None
    assert memory.temp_size_in_bytes < shape.spec.num_pages * shape.spec.bytes_per_page // 8
    assert text is not None
    assert "mosaic_gpu" in text
    assert " while(" not in text


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("num_tokens", [64, 512], ids=["decode", "mixed"])
def test_latents_are_updated_in_place_and_read_without_spilling(
    heads: int, num_tokens: int
) -> None:
    shape = dataclasses.replace(LATENTS, heads=heads, num_tokens=num_tokens)
    program = compiled(shape, "mosaic")
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None
    assert memory.temp_size_in_bytes < shape.spec.num_pages * shape.spec.bytes_per_page // 4
    assert text is not None
    assert "paged_decode" in text
    assert " while(" not in text


@pytest.mark.parametrize(
    "shape",
    [
        MIXED,
        dataclasses.replace(MIXED, head_dim=128, page_size=8),
        dataclasses.replace(MIXED, heads=7, kv_heads=1, head_dim=192, page_size=128),
        dataclasses.replace(MIXED, heads=24, kv_heads=1, head_dim=256, window=100, soft_cap=9.0),
        dataclasses.replace(MIXED, heads=64, window=128, sinks=True),
        dataclasses.replace(MIXED, heads=64, window=128, sinks=True, kv_dtype="fp8_e5m2"),
        dataclasses.replace(MIXED, head_dim=192, page_size=8, kv_dtype="int8"),
        dataclasses.replace(MIXED, head_dim=256, page_size=128, soft_cap=9.0, kv_dtype="fp8"),
    ],
    ids=["64", "128", "192", "256", "gpt-oss", "64 of e5m2", "192 of int8", "256 of fp8"],
)
def test_the_mosaic_kernel_lowers(shape: Shape) -> None:
    text = compiled(shape, "mosaic").as_text()
    assert text is not None
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    "shape",
    [
        DECODE,
        dataclasses.replace(DECODE, head_dim=128, num_rows=1, num_tokens=1),
        dataclasses.replace(DECODE, heads=9, kv_heads=3, page_size=32),
        dataclasses.replace(DECODE, heads=7, kv_heads=1, head_dim=192, page_size=8),
        dataclasses.replace(DECODE, heads=48, kv_heads=3, head_dim=256, page_size=128),
        dataclasses.replace(DECODE, heads=64, window=128, sinks=True),
        dataclasses.replace(DECODE, heads=8, kv_heads=4, head_dim=256, window=100, soft_cap=9.0),
        dataclasses.replace(DECODE, head_dim=128, kv_dtype="fp8"),
        dataclasses.replace(DECODE, heads=64, window=128, sinks=True, kv_dtype="fp8_e5m2"),
        dataclasses.replace(DECODE, heads=32, kv_heads=2, head_dim=256, kv_dtype="fp8"),
        dataclasses.replace(LATENTS, num_tokens=64),
        dataclasses.replace(LATENTS, num_tokens=1, num_rows=1, page_size=8, dtype="float16"),
    ],
    ids=[
        "64",
        "128",
        "SmolLM2",
        "192",
        "256",
        "gpt-oss",
        "Gemma",
        "128 of fp8",
        "64 of e5m2",
        "256 of fp8",
        "DeepSeek",
        "DeepSeek of 8",
    ],
)
def test_the_mosaic_decode_kernels_do_not_spill(shape: Shape, ptxas: Callable[[], str]) -> None:
    compiled(shape, "mosaic")
    said = ptxas()
    assert aot.nothing_spilled(said)
    assert said.count("spill stores") == said.count("entry function 'paged_decode") == 2


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_mosaic_prefill_kernels_spill_little_where_they_split_contexts(
    head_dim: int, kv_dtype: str | None, ptxas: Callable[[], str]
) -> None:
    compiled(dataclasses.replace(MIXED, head_dim=head_dim, kv_dtype=kv_dtype), "mosaic")
    said = re.findall(r"properties for (\w+)_mosaic_gpu_.*\n.* (\d+) bytes spill stores", ptxas())
    spilled = {name: int(stores) for name, stores in said}
    assert spilled["paged_prefill_merge"] == 0
    assert spilled["paged_prefill_mosaic"] < 320  # numbers that wait for the end of a piece


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 16, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4, 7, 16, 24])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1000, 50.0)])
def test_every_shape_compiles_without_spilling(
    page_size: int,
    head_dim: int,
    group: int,
    dtype: str,
    window: int | None,
    soft_cap: float | None,
) -> None:
    shape = dataclasses.replace(
        MIXED,
        heads=2 * group,
        kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        window=window,
        soft_cap=soft_cap,
    )
    compiled(shape)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4, 7, 16, 24])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_shape_over_pages_of_8_bits_compiles_without_spilling(
    kv_dtype: str, head_dim: int, group: int, dtype: str
) -> None:
    shape = dataclasses.replace(
        MIXED, heads=2 * group, kv_heads=2, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype
    )
    compiled(shape)
    compiled(dataclasses.replace(shape, window=1000, soft_cap=50.0, sinks=True))
