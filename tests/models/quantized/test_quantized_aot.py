"""Quantised products of an 8B model's size, compiled for a GPU on any machine."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from paged.models.quantized import ChannelScaled
from paged.models.quantized.channels import FLOAT8, INT8
from tests.paged import aot

pytestmark = pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]")

INPUTS, SIZE = 4096, 14336


@pytest.mark.parametrize("rows", [1, 32, 2048])
@pytest.mark.parametrize("dtype", [FLOAT8, INT8], ids=str)
def test_a_weight_of_8_bits_is_multiplied_as_it_lies(rows, dtype):
    weight = ChannelScaled(
        jax.ShapeDtypeStruct((2, SIZE, INPUTS), dtype),
        jax.ShapeDtypeStruct((2, SIZE), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((rows, INPUTS), jnp.bfloat16)
    program = aot.compile_for_h200(lambda x, weight: weight.gated(x, "silu"), x, weight)
    text = program.as_text()
    assert text is not None
    assert not re.findall(r"= \w+\[\d+,[\d,]+\]\S* (?:copy|transpose)\(", text)
    report = program.memory_analysis()
    assert report is not None
    # The product before it is scaled, in 32 bits where the weight is of integers; nothing as large
    # as a weight of another dtype.
    assert report.temp_size_in_bytes < rows * 2 * SIZE * 4 + 2**19 < 2 * SIZE * INPUTS * 2 + 2**28
