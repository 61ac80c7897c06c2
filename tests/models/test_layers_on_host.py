"""Layers on the host: each is there when it is used, and no more of them than two at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from paged.models.loading.dummy import random_params
from paged.models.offloading import NUM_COPIES, Layers, OnHost, host_shapes, put_on_host
from paged.models.registry import get_family, model_config
from paged.models.weights import PINNED, param_shapes
from tests.models.harness import load_golden

HOST = SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED)


def layers_of(on_host: set[int]) -> list[Any]:
    """Six layers of a weight each, 1 to 6."""
    weights = [{"weight": jnp.full(3, index + 1.0)} for index in range(6)]
    return [
        OnHost(jax.device_put(each, HOST)) if index in on_host else each
        for index, each in enumerate(weights)
    ]


def forward(layers: list[Any], x: jax.Array) -> jax.Array:
    """10 x + 1, of that 10 times it + 2, and so on: the order shows."""
    handed = Layers(layers)
    for _ in layers:
        weights, x = handed.next(x)
        x = 10 * x + weights["weight"]
    return x


@pytest.mark.parametrize("on_host", [set(), {0}, {5}, {1, 3, 4}, set(range(6))])
def test_each_layer_gets_its_own_weights(on_host: set[int]) -> None:
    assert jax.jit(forward)(layers_of(on_host), jnp.zeros(3)).tolist() == [123456.0] * 3


def test_a_copy_begins_when_the_one_before_the_last_is_used_up() -> None:
    """Each waits by a barrier for the input of the layer before it; only the first need not."""
    jaxpr = jax.make_jaxpr(forward)(layers_of({0, 2, 3, 5}), jnp.zeros(3))
    order = [
        eqn.primitive.name
        for eqn in jaxpr.eqns
        if eqn.primitive.name in ("device_put", "optimization_barrier", "mul")
    ]
    first, pair, compute = ["device_put"], ["optimization_barrier", "device_put"], ["mul"]
    assert order == [
        *(first + pair + compute),  # layer 0, while 2 is copied
        *compute,
        *(pair + compute),  # 2, while 3 is copied
        *(pair + compute),  # 3, while 5 is copied
        *compute,
        *compute,
    ]
    assert NUM_COPIES == 2


def test_parameters_are_made_where_they_live() -> None:
    """And are the same as on the device, and of the shapes that programs are compiled for."""
    config = model_config(load_golden("llama")["config"])
    specs, dtype = get_family(config.architecture).specs(config), jnp.dtype(jnp.float32)
    there = put_on_host(specs, {1})
    params, expected = random_params(there, dtype), random_params(specs, dtype)
    shapes = host_shapes(param_shapes(specs, dtype), {1}, jax.devices()[0])
    assert repr(jax.tree.structure(params)) == repr(jax.tree.structure(shapes))
    assert isinstance(params.layers[1], OnHost)
    assert not isinstance(params.layers[0], OnHost)
    for param, shape, same in zip(*map(jax.tree.leaves, (params, shapes, expected)), strict=True):
        kind = None if shape.sharding is None else shape.sharding.memory_kind
        assert param.sharding.memory_kind == (kind or "device")
        np.testing.assert_array_equal(param, same)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(params.layers[1])}
    assert kinds == {PINNED}
