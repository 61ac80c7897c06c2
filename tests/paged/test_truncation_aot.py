"""The threshold's kernels compile for an H200, in registers, whatever the vocabulary's size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from paged.truncation import truncation_thresholds
from tests.paged import aot

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]"),
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, 128256), (256, 128256), (3, 97), (8, 32003), (32, 262144)]
)
def test_the_kernels_compile_and_nothing_loops_over_the_host(
    num_rows: int, vocab_size: int
) -> None:
    number = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    program = aot.compile_for_h200(
        truncation_thresholds,
        jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32),
        number,
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        number,
        number,
    )
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    assert "paged_threshold" in text
    assert " while(" not in text
    # Three numbers for each of the groups, which are 64 logits, and 2,048 logits brought together;
    # far less than a copy of all.
    numbers = vocab_size // 16 + 2048
    assert memory.temp_size_in_bytes < 4 * num_rows * numbers + 2**16
