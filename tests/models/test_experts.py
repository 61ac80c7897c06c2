"""Mixtures of experts: who is chosen, what is added up, and how the weights are put together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.cache import DROPPED
from paged.errors import ConfigError
from paged.models.experts import DenseExperts, Mixture, Routing, mix, stacked
from paged.models.weights import Dense, fused_linear

F32 = jnp.dtype(jnp.float32)
X, C, D, F, T = 5, 2, 6, 4, 7
ROUTING = Routing(num_experts=X, num_chosen=C, expert_size=F, renormalise=True)


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mixture(router: np.ndarray | None = None) -> Mixture:
    return Mixture(
        router=Dense(jnp.asarray(drawn(0, D, X) if router is None else router)),
        gate_up=DenseExperts(jnp.asarray(drawn(1, X, D, 2, F))),
        down=DenseExperts(jnp.asarray(drawn(2, X, F, D))),
    )


def mixed(params: Mixture, x: np.ndarray, num_tokens: int = T) -> np.ndarray:
    """`mix` of x, of which the last rows are padding."""
    token = np.arange(len(x))
    meta: Any = SimpleNamespace(write_index=jnp.where(token < num_tokens, token, DROPPED + token))
    return np.asarray(mix(params, ROUTING, jnp.asarray(x), meta, "silu"))


def one_by_one(params: Mixture, x: np.ndarray) -> np.ndarray:
    """The same by a loop over tokens and the experts that each chooses."""
    out = np.zeros_like(x)
    weights, chosen = ROUTING.choose(params.router(jnp.asarray(x)))
    for token, row in enumerate(x):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = np.einsum("k,knf->nf", row, params.gate_up.kernel[expert])
            hidden = np.asarray(jax.nn.silu(gate)) * up
            out[token] += float(weight) * (hidden @ np.asarray(params.down.kernel[expert]))
    return out


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_are_shares_among_the_chosen_or_among_all(renormalise):
    scores = drawn(3, T, X)
    routing = Routing(X, C, F, renormalise)
    weights, chosen = routing.choose(jnp.asarray(scores))
    assert np.array_equal(chosen, np.argsort(-scores)[:, :C])
    shares = np.exp(np.take_along_axis(scores, np.asarray(chosen), axis=1))
    total = shares if renormalise else np.exp(scores)
    np.testing.assert_allclose(weights, shares / total.sum(axis=1, keepdims=True), rtol=1e-5)


def test_each_token_gets_what_its_own_experts_answer():
    params, x = mixture(), drawn(4, T, D)
    np.testing.assert_allclose(mixed(params, x), one_by_one(params, x), atol=1e-5)


def test_all_may_choose_the_same():
    router = np.zeros((D, X), np.float32)
    router[:, 3] = router[:, 1] = 1  # the others get no token
    params, x = mixture(router), np.abs(drawn(5, T, D))
    np.testing.assert_allclose(mixed(params, x), one_by_one(params, x), atol=1e-5)


@pytest.mark.parametrize("filling", [0.0, 1e6, np.nan])
def test_padding_disturbs_nobody_and_gets_nothing(filling):
    params, x = mixture(), drawn(6, T, D)
    padded = np.concatenate([x, np.full((4, D), filling, np.float32)])
    out = mixed(params, padded)
    np.testing.assert_allclose(out[:T], mixed(params, x), atol=1e-6)
    assert not out[T:].any()


def test_experts_are_stacked_in_their_order():
    parts = [drawn(index, F, D) for index in range(2 * X)]
    described: Any = stacked(
        [
            fused_linear(
                {f"{expert}.gate": (1, F), f"{expert}.up": (1, F)},
                D,
                bias=False,
                join_axis=0,
                axes=(None, None, "mlp"),
            )
            for expert in range(X)
        ]
    )
    spec = described.kernel
    names = [f"{expert}.{part}.weight" for expert in range(X) for part in ("gate", "up")]
    assert [part.name for part in spec.parts] == names
    assert spec.axes == (None, None, None, "mlp")
    kernel = spec.assemble([jnp.asarray(part) for part in parts], F32)
    assert kernel.shape == spec.shape == (X, D, 2, F)
    for expert in range(X):
        for half in range(2):
            assert np.array_equal(kernel[expert, :, half], parts[2 * expert + half].T)


def test_no_more_experts_can_be_chosen_than_there_are():
    with pytest.raises(ConfigError, match=r"num_experts_per_tok 6 .* 5 experts"):
        Routing(num_experts=5, num_chosen=6, expert_size=F, renormalise=True)
