"""Choosing tokens on an H200 holds no second copy of the logits, and never asks the host."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from paged.runtime.batch import SAMPLING_FIELDS, unpack_sampling
from paged.runtime.sampler import SamplingMode, choose_tokens, token_logprobs
from tests.paged import aot

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]"),
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

ROWS, VOCAB = 256, 128256
LOGITS = jax.ShapeDtypeStruct((ROWS, VOCAB), jnp.float32)


def check(program: jax.stages.Compiled) -> None:
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    assert " while(" not in text
    assert memory.temp_size_in_bytes < 4 * ROWS * VOCAB // 8


@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.RANDOM, SamplingMode.FILTERED])
def test_tokens_are_chosen_beside_the_logits(mode: SamplingMode) -> None:
    def choose(logits: jax.Array, sampling: jax.Array, mode: SamplingMode) -> jax.Array:
        return choose_tokens(logits, unpack_sampling(sampling), None, mode)

    sampling = jax.ShapeDtypeStruct((ROWS, len(SAMPLING_FIELDS)), jnp.int32)
    check(aot.compile_for_h200(partial(choose, mode=mode), LOGITS, sampling))


def test_log_probabilities_are_found_beside_the_logits() -> None:
    tokens = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    check(aot.compile_for_h200(token_logprobs, LOGITS, tokens))
