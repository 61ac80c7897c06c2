"""Choosing among the experts of the best groups, against a loop over tokens."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.group_routing import GroupRouting

X, C, T = 12, 5, 50
ROUTING = GroupRouting(
    num_experts=X,
    num_chosen=C,
    expert_size=4,
    renormalise=True,
    num_groups=4,
    chosen_groups=2,
    best=2,
    sigmoid=True,
    factor=2.5,
)
V2 = replace(ROUTING, renormalise=False, best=1, sigmoid=False)
LITE = replace(V2, num_groups=1, chosen_groups=1)


def one_by_one(routing: GroupRouting, scores: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """What each expert counts for each token [T, X], 0 for those that are not chosen."""
    out = np.zeros_like(scores)
    size = X // routing.num_groups
    for token, row in enumerate(scores):
        counts = 1 / (1 + np.exp(-row)) if routing.sigmoid else np.exp(row) / np.exp(row).sum()
        preferred = counts + bias
        groups = preferred.reshape(-1, size)
        quality = np.sort(groups, axis=1)[:, -routing.best :].sum(axis=1)
        allowed = np.argsort(-quality)[: routing.chosen_groups]
        candidates = [expert for expert in range(X) if expert // size in allowed]
        chosen = sorted(candidates, key=lambda expert: -preferred[expert])[:C]
        total = counts[chosen].sum() if routing.renormalise else 1
        out[token, chosen] = routing.factor * counts[chosen] / total
    return out


@pytest.mark.parametrize("routing", [ROUTING, V2, LITE], ids=["V3", "V2", "V2-Lite"])
@pytest.mark.parametrize("biased", [False, True])
def test_choice_and_weights(routing: GroupRouting, biased: bool) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(T, X)).astype(np.float32)
    bias = (rng.normal(size=X) if biased else np.zeros(X)).astype(np.float32)
    weights, chosen = routing.choose(jnp.asarray(scores), jnp.asarray(bias) if biased else None)
    found = np.zeros((T, X))
    np.put_along_axis(found, np.asarray(chosen), np.asarray(weights), axis=1)
    np.testing.assert_allclose(found, one_by_one(routing, scores, bias), rtol=1e-5, atol=1e-7)
