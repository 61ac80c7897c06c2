"""Descriptions of parameters: assembling, memory, sharding, and the weight types themselves."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from paged.models.config import ModelConfig
from paged.models.layers import qkv_projection, split_qkv
from paged.models.loading.dummy import random_params
from paged.models.registry import get_family
from paged.models.weights import (
    Dense,
    Embedding,
    HopperDense,
    Portable,
    for_device,
    fused_linear,
    param_bytes,
    param_shapes,
    param_shardings,
)

F32 = jnp.dtype(jnp.float32)
HOPPER: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=24,
    intermediate_size=20,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    windows=(None, None),
)


def specs():
    return get_family(CONFIG.architecture).specs(CONFIG)


def test_fused_parts_multiply_as_they_would_alone():
    rng = np.random.default_rng(0)
    gate, up, x = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)), rng.normal(size=(2, 3))
    described: Any = fused_linear(
        {"gate": (1, 5), "up": (1, 5)}, 3, bias=False, join_axis=0, axes=(None, None, "mlp")
    )
    kernel = described.kernel.assemble([jnp.asarray(gate), jnp.asarray(up)], F32)
    assert kernel.shape == described.kernel.shape == (3, 2, 5)
    out = Dense(kernel)(jnp.asarray(x, F32))
    np.testing.assert_allclose(out[:, 0], x @ gate.T, rtol=1e-5)
    np.testing.assert_allclose(out[:, 1], x @ up.T, rtol=1e-5)


def test_qkv_keeps_each_group_together():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(heads * 4, 24)).astype(np.float32) for heads in (6, 2, 2))
    q_bias, k_bias, v_bias = (rng.normal(size=n).astype(np.float32) for n in (24, 8, 8))
    described: Any = qkv_projection("p", CONFIG, bias=True)
    weight = Dense(
        described.kernel.assemble([q, k, v], F32),
        described.bias.assemble([q_bias, k_bias, v_bias], F32),
    )
    x = rng.normal(size=(3, 24)).astype(np.float32)
    queries, keys, values = split_qkv(weight(jnp.asarray(x)))
    np.testing.assert_allclose(queries.reshape(3, -1), x @ q.T + q_bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(keys.reshape(3, -1), x @ k.T + k_bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values.reshape(3, -1), x @ v.T + v_bias, rtol=1e-4, atol=1e-5)


def test_dense_answers_in_the_dtype_asked_for():
    weight = Dense(jnp.ones((2, 3), jnp.bfloat16), jnp.ones(3, jnp.bfloat16))
    x = jnp.ones((1, 2), jnp.bfloat16)
    assert weight(x).dtype == jnp.bfloat16
    assert weight(x, F32).dtype == jnp.float32
    np.testing.assert_array_equal(weight(x, F32), [[3, 3, 3]])


def test_embedding_clips_ids_of_padding_and_unembeds():
    table = jnp.arange(6.0).reshape(3, 2)
    embedding = Embedding(table)
    np.testing.assert_array_equal(embedding.lookup(jnp.array([1, 99])), [[2, 3], [4, 5]])
    np.testing.assert_array_equal(embedding.unembed(table[:1], F32), [[1, 3, 5]])


def test_memory_estimate_is_what_random_weights_take():
    dtype = jnp.dtype(jnp.bfloat16)
    params = random_params(specs(), dtype)
    assert param_bytes(specs(), dtype) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert param_shapes(specs(), dtype) == jax.eval_shape(lambda: params)


def test_random_weights_depend_on_the_seed_and_nothing_else():
    first, again, other = (random_params(specs(), F32, seed=seed) for seed in (0, 0, 1))
    kernel = first.layers[0].qkv.kernel
    np.testing.assert_array_equal(kernel, again.layers[0].qkv.kernel)
    assert not np.array_equal(kernel, other.layers[0].qkv.kernel)
    assert not np.array_equal(kernel, first.layers[1].qkv.kernel)
    assert 0.015 < float(kernel.std()) < 0.025
    np.testing.assert_array_equal(first.final_norm, np.ones(24))


def test_shardings_follow_the_logical_axes():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    shardings = param_shardings(specs(), mesh)
    layer = shardings.layers[0]
    assert layer.qkv.kernel.spec == PartitionSpec(None, "tensor", None, None)
    assert layer.out.kernel.spec == PartitionSpec("tensor", None)
    assert layer.gate_up.kernel.spec == PartitionSpec(None, None, "tensor")
    assert layer.down.kernel.spec == PartitionSpec("tensor", None)
    assert shardings.embedding.table.spec == PartitionSpec("tensor", None)
    assert shardings.final_norm.spec == PartitionSpec(None)
    params = random_params(specs(), F32, sharding=shardings)
    assert params.layers[0].qkv.kernel.sharding == layer.qkv.kernel


def test_residual_and_gate_follow_the_product() -> None:
    rng = np.random.default_rng(4)
    x, residual = rng.normal(size=(5, 3)), rng.normal(size=(5, 4))
    kernel, both = rng.normal(size=(3, 4)), rng.normal(size=(3, 2, 4))
    added = Dense(jnp.asarray(kernel, F32)).added_to(
        jnp.asarray(residual, F32), jnp.asarray(x, F32)
    )
    np.testing.assert_allclose(added, residual + x @ kernel, rtol=1e-5)
    gated = Dense(jnp.asarray(both, F32)).gated(jnp.asarray(x, F32), "silu")
    gate, up = x @ both[:, 0], x @ both[:, 1]
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=1e-4)


def test_only_hopper_gets_its_own_products() -> None:
    specs = get_family(CONFIG.architecture).specs(CONFIG)
    shapes = param_shapes(specs, jnp.dtype(jnp.bfloat16))
    ada: Any = SimpleNamespace(platform="gpu", compute_capability="8.9")
    assert for_device(shapes, ada) is shapes
    fast = for_device(shapes, HOPPER)
    assert type(fast.layers[0].qkv) is HopperDense
    assert fast.layers[0].qkv.device_kind == "NVIDIA H200"
    assert fast.layers[0].qkv.kernel is shapes.layers[0].qkv.kernel
    assert isinstance(fast.embedding, Embedding)


def test_weights_are_made_anew_one_at_a_time() -> None:
    """The largest first, each finding the memory of those before."""
    alive: list[weakref.ref[jax.Array]] = []
    seen: list[tuple[int, int]] = []

    @struct.dataclass
    class Weight(Portable):
        array: jax.Array

        def on_hopper(self, device_kind: str) -> Self:
            seen.append((self.array.size, sum(ref() is not None for ref in alive)))
            return replace(self, array=self.array + 1)

    def weights() -> list[Weight]:
        made = [Weight(jnp.zeros(size)) for size in (2, 8, 4)]
        alive.extend(weakref.ref(weight.array) for weight in made)
        return made

    found = for_device(weights(), HOPPER)
    assert [each.array.tolist() for each in found] == [[1] * 2, [1] * 8, [1] * 4]
    assert seen == [(8, 3), (4, 2), (2, 1)]
