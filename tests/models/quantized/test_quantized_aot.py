"""Quantised products of an 8B model's size, compiled for a GPU on any machine."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paged.matmul import Groups
from paged.models.activations import ClampedSwiglu
from paged.models.quantized import E2M1, ChannelScaled, GroupCoded, GroupScaled, TileScaled
from paged.models.quantized.channels import FLOAT8, INT8
from paged.models.scaled_experts import ScaledExperts
from paged.models.weights import for_device
from tests.paged import aot

pytestmark = pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]")

INPUTS, SIZE = 4096, 14336


def array(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("rows", [1, 32, 2048])
@pytest.mark.parametrize("dtype", [FLOAT8, INT8], ids=str)
def test_a_weight_of_8_bits_is_multiplied_as_it_lies(rows, dtype):
    weight: Any = ChannelScaled(
        array((2, SIZE, INPUTS), dtype),
        array((2, SIZE), jnp.float32),
    )
    x = array((rows, INPUTS), jnp.bfloat16)
    report = compiled(x, for_device(weight, aot.H200.device), "paged_matmul_gated")
    # The rows in 8 bits, and their scales.
    assert report.temp_size_in_bytes < rows * INPUTS + rows * 4 + 2**12


@pytest.mark.parametrize("rows", [1, 32, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_a_weight_of_4_bits_is_not_expanded_for_a_few_rows(rows, dtype):
    weight: Any = GroupScaled(
        array((INPUTS // 2, 2, SIZE), jnp.uint8),
        array((INPUTS // 128, 2, SIZE), dtype),
        array((INPUTS // 128, 2, SIZE), jnp.uint8),
        bits=4,
    )
    x = array((rows, INPUTS), dtype)
    report = compiled(x, for_device(weight, aot.H200.device), "paged_matmul_narrow_gated")
    assert report.temp_size_in_bytes < SIZE * INPUTS  # a quarter of the expanded weight


@pytest.mark.parametrize("rows", [1, 512, 520])
def test_a_weight_in_tiles_is_expanded_once_for_many_rows(rows):
    weight: Any = TileScaled(
        array((2, SIZE, INPUTS), FLOAT8), array((2, SIZE, INPUTS // 128), jnp.float32)
    )
    x = array((rows, INPUTS), jnp.bfloat16)
    kernel = "paged_expand" if rows > 512 else "paged_matmul_narrow_gated"
    report = compiled(x, for_device(weight, aot.H200.device), kernel)
    written = 2 * SIZE * INPUTS * 2 if rows > 512 else 0
    assert report.temp_size_in_bytes < written + rows * 2 * SIZE * 4 + 2**20


def compiled(x: Any, weight: Any, kernel: str) -> Any:
    """What a gated product takes; it must call a kernel, and copy nothing."""
    program = aot.compile_for_h200(lambda x, weight: weight.gated(x, "silu"), x, weight)
    text = program.as_text()
    assert text is not None
    assert kernel in text
    assert not re.findall(r"= \w+\[\d+,[\d,]+\]\S* (?:copy|transpose)\(", text)
    report = program.memory_analysis()
    assert report is not None
    return report


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("rows", [8, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_experts_in_mxfp4_are_not_expanded_for_a_few_rows(rows, dtype):
    experts, inputs, size = 32, 2880, 2880
    weights = GroupCoded(
        array((experts, inputs // 2, 2, size), jnp.uint8),
        array((experts, inputs // 32, 2, size), jnp.uint8),
        codes=E2M1,
    )
    faster: Any = for_device(ScaledExperts(weights), aot.H200.device)
    x, sizes = array((rows, inputs), dtype), array((experts,), jnp.int32)
    program = aot.compile_for_h200(
        lambda x, sizes, each: each.gated(x, Groups.of(sizes, rows), ClampedSwiglu(1.7, 7.0)),
        *(x, sizes, faster),
    )
    text = program.as_text()
    assert text is not None
    assert "grouped_codes_matmul" in text
    report = program.memory_analysis()
    assert report is not None
    assert report.temp_size_in_bytes < 2**26 < experts * inputs * size // 2
