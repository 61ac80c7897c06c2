"""The kernels that run on GPUs before Hopper compile for them: less shared memory, other products.

Nothing is run. Registers may spill where pages do not hold 16 bits: that is slower, not wrong.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from paged.attention import default_backend
from paged.cache import Pages
from paged.truncation import truncation_thresholds
from tests.paged import aot
from tests.paged.ragged import Shape, step

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]"),
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

GPUS = pytest.mark.parametrize("gpu", [aot.A100, aot.L40], ids=lambda gpu: gpu.name)
# Decode rows beside chunks: both kernels in one program.
MIXED = Shape(heads=32, kv_heads=8, dtype="bfloat16", num_rows=64, num_tokens=512, max_len=4096)


def compile_attention(gpu: aot.Gpu, shape: Shape) -> str:
    """One layer's attention by the backend that this GPU gets; the program's text."""
    vector = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens = functools.partial(jax.ShapeDtypeStruct, dtype=shape.dtype)
    program = aot.compile_for(
        gpu,
        step(shape, default_backend(gpu.device), decode_only=False),
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
        may_spill=shape.spec.dtype.itemsize != 2,
    )
    text = program.as_text()
    assert text is not None
    return text


def check(gpu: aot.Gpu, shape: Shape) -> None:
    text = compile_attention(gpu, shape)
    assert "/paged_decode/" in text
    assert "/paged_prefill/" in text


@GPUS
@pytest.mark.parametrize(
    "shape",
    [
        dataclasses.replace(MIXED, head_dim=128),
        dataclasses.replace(MIXED, head_dim=256, dtype="float16", window=100, soft_cap=9.0),
        dataclasses.replace(MIXED, head_dim=128, dtype="float32"),
        dataclasses.replace(MIXED, head_dim=128, kv_dtype="int8"),
        dataclasses.replace(MIXED, head_dim=128, kv_dtype="fp8_e5m2"),
        dataclasses.replace(MIXED, heads=64, window=128, sinks=True),
        dataclasses.replace(MIXED, heads=16, kv_heads=1, head_dim=576, latent_rank=512),
        dataclasses.replace(MIXED, heads=128, kv_heads=1, head_dim=576, latent_rank=512),
    ],
    ids=["bfloat16", "float16", "float32", "int8", "fp8_e5m2", "gpt-oss", "Lite", "DeepSeek"],
)
def test_attention_compiles(gpu: aot.Gpu, shape: Shape) -> None:
    check(gpu, shape)


def test_ada_reads_pages_of_fp8() -> None:
    check(aot.L40, dataclasses.replace(MIXED, head_dim=128, kv_dtype="fp8"))


@pytest.mark.slow
@GPUS
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 24])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8_e5m2"])
def test_every_shape_compiles(
    gpu: aot.Gpu, head_dim: int, group: int, dtype: str, kv_dtype: str | None
) -> None:
    shape = dataclasses.replace(
        MIXED,
        heads=2 * group,
        kv_heads=2,
        head_dim=head_dim,
        page_size=8,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    check(gpu, shape)


@GPUS
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 128256), (32, 262144)])
def test_truncation_compiles(gpu: aot.Gpu, num_rows: int, vocab_size: int) -> None:
    number = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    program = aot.compile_for(
        gpu,
        truncation_thresholds,
        jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32),
        number,
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        number,
        number,
    )
    text = program.as_text()
    assert text is not None
    assert "paged_threshold" in text
