"""A request for which the model computes NaN: it fails, and nobody else does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.loading import ModelSource
from paged.models.mesh import TENSOR, highest
from paged.runtime.core import EngineCore
from paged.runtime.messages import NO_NUMBERS
from paged.runtime.sampler import NO_TOKEN, checked_tokens
from tests.runtime.test_core import (
    VOCAB,
    drain,
    make_core,
    make_request,
    prompt_of,
    run,
    source,
)

__all__ = ["source"]  # fixtures

POISON = 5  # no other prompt holds it


@pytest.fixture(scope="module")
def core(source: ModelSource, compile_cache: str) -> Iterator[EngineCore]:
    """One whose model has no numbers for a token."""
    core = make_core(source, compile_cache)
    params = core._runner._device.params
    embedding = next(leaf for leaf in jax.tree.leaves(params) if leaf.shape[0] == VOCAB)
    broken = embedding.at[POISON].set(jnp.nan)
    swap = jax.tree.map(lambda leaf: broken if leaf is embedding else leaf, params)
    core._runner._device.params = swap
    yield core
    core.close()


def poisoned(length: int) -> list[int]:
    return [*prompt_of(length), POISON, *prompt_of(length, 1)]


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 5},
    {"logit_bias": {9: 2.0}, "repetition_penalty": 1.2},
    {"logprobs": 3},
]


@pytest.mark.parametrize("params", PARAMS)
def test_it_fails_alone(core: EngineCore, params: dict[str, Any]) -> None:
    others = [make_request(f"other {i}", prompt_of(20 + i), **params, seed=i) for i in range(3)]
    expected = run(core, *others)
    core.reset_prefix_cache()
    for request in others:
        core.add(request)
    for _ in range(3):
        core.step()
    core.add(make_request("poisoned", poisoned(12), **params))
    news = drain(core)
    [end] = [item for item in news if item.request_id == "poisoned" and item.finish_reason]
    assert (end.finish_reason, end.error, end.token_ids) == ("abort", NO_NUMBERS, [])
    assert {item.request_id for item in news if item.finish_reason == "length"} == {
        request.request_id for request in others
    }
    assert core.stats().kv_cache_usage == 0
    core._pool.check()
    # Pages that were the poisoned one's are used again, in whole and in part.
    core.reset_prefix_cache()
    assert run(core, *others) == expected


def test_its_pages_are_nobodys_prefix(core: EngineCore) -> None:
    core.reset_prefix_cache()
    for _ in range(2):
        core.add(make_request("poisoned", poisoned(40)))
        [end] = [item for item in drain(core) if item.finish_reason]
        assert end.error == NO_NUMBERS
        assert end.num_cached_tokens == 0
    assert core.stats().num_cached_pages == 0


def test_what_is_no_number() -> None:
    rows = [[1.0, 2.0, -jnp.inf], [1.0, jnp.nan, 2.0], [jnp.inf, 0.0, 0.0], [-jnp.inf] * 3]
    logits = jnp.array(rows)
    tokens = checked_tokens(logits, jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(tokens, [1, NO_TOKEN, NO_TOKEN, 0])


def test_devices_that_share_a_vocabulary_see_the_same() -> None:
    rows = jnp.array([[1.0, 2, 0, 0], [0, 0, 1, 3], [0, 0, 1, jnp.nan], [jnp.inf, 0, 0, 0]])
    shares = jnp.moveaxis(rows.reshape(4, 2, 2), 1, 0)

    def tokens_of(share: jax.Array) -> jax.Array:
        return checked_tokens(share, highest(share, 4), 4)

    tokens = jax.vmap(tokens_of, axis_name=TENSOR)(shares)
    np.testing.assert_array_equal(tokens, [[1, 3, NO_TOKEN, NO_TOKEN]] * 2)
