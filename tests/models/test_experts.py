"""Mixtures of experts: who is chosen, what is added up, and how the weights are put together."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged import matmul
from paged.cache import DROPPED
from paged.errors import ConfigError
from paged.matmul import tiling
from paged.models.activations import ClampedSwiglu
from paged.models.experts import DenseExperts, HopperExperts, Mixture, Routing, mix, stacked
from paged.models.registry import model_config
from paged.models.weights import Dense, for_device, fused_linear

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
    assert isinstance(params.gate_up, DenseExperts)
    assert isinstance(params.down, DenseExperts)
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


@pytest.mark.parametrize("most_rows", [0, 512], ids=["XLA", "one kernel"])
@pytest.mark.parametrize("activation", ["silu", ClampedSwiglu(1.7, 7.0)], ids=str)
def test_a_hopper_gpus_experts_answer_alike(most_rows, activation, monkeypatch):
    interpret = plgpu.InterpretGPUParams()
    monkeypatch.setattr(
        matmul, "grouped_matmul", partial(matmul.grouped_matmul, interpret=interpret)
    )
    monkeypatch.setattr(
        matmul, "in_groups_at_once", partial(matmul.in_groups_at_once, interpret=True)
    )
    monkeypatch.setattr(matmul, "MOST_ROWS", most_rows)
    monkeypatch.setattr(tiling, "MULTIPROCESSORS", 4)
    half = lambda *args: jnp.asarray(drawn(*args), "bfloat16")  # noqa: E731
    bias = activation != "silu"
    plain = Mixture(
        router=Dense(half(0, 64, X)),
        gate_up=DenseExperts(half(1, X, 64, 2, 64) / 8, half(4, X, 2, 64) if bias else None),
        down=DenseExperts(half(2, X, 64, 64) / 8, half(5, X, 64) if bias else None),
    )
    device: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="a Hopper")
    fast = for_device(plain, device)
    assert isinstance(fast.gate_up, HopperExperts)
    x, token = half(3, T, 64), np.arange(T)
    meta: Any = SimpleNamespace(write_index=jnp.where(token < T - 2, token, DROPPED + token))
    expected, found = (
        np.asarray(mix(each, ROUTING, x, meta, activation), np.float32) for each in (plain, fast)
    )
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)
    assert not found[-2:].any()


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
    assert spec.axes == ("experts", None, None, None)
    kernel = spec.assemble([jnp.asarray(part) for part in parts], F32)
    assert kernel.shape == spec.shape == (X, D, 2, F)
    for expert in range(X):
        for half in range(2):
            assert np.array_equal(kernel[expert, :, half], parts[2 * expert + half].T)


def test_no_more_experts_can_be_chosen_than_there_are():
    with pytest.raises(ConfigError, match=r"num_experts_per_tok 6 .* 5 experts"):
        Routing(num_experts=5, num_chosen=6, expert_size=F, renormalise=True)


QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
    ],
)
def test_some_layers_have_no_mixture(changes, sparse):
    assert model_config(QWEN | changes).extras.sparse == sparse


def test_the_number_of_experts_has_two_names():
    routings = [
        model_config(QWEN | {key: 9}).extras.routing for key in ("num_experts", "num_local_experts")
    ]
    assert routings[0] == routings[1]
    assert routings[0].num_experts == 9


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": True, "sliding_window": 8}, ["use_sliding_window", "True"]),
        ({"num_experts": 3, "num_experts_per_tok": 5}, ["num_experts_per_tok 5", "3"]),
        ({"num_experts": "8"}, ["num_experts", "'8'"]),
        ({"norm_topk_prob": "yes"}, ["norm_topk_prob", "'yes'"]),
        ({"mlp_only_layers": [4]}, ["mlp_only_layers", "0 to 3", "[4]"]),
        ({"mlp_only_layers": [[1]]}, ["mlp_only_layers", "[[1]]"]),
        ({"mlp_only_layers": 1}, ["mlp_only_layers", "1"]),
    ],
)
def test_refusals_name_the_setting(architecture, changes, words):
    with pytest.raises(ConfigError) as error:
        model_config(QWEN | changes | {"architectures": [architecture]})
    assert all(word in str(error.value) for word in words)
