"""gpt-oss: its experts' weights in 4 bits are those of the same checkpoint written out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.errors import ConfigError
from paged.models.activations import ClampedSwiglu, gate
from paged.models.gpt_oss import specs
from paged.models.quantized import E2M1, GroupCoded
from paged.models.registry import model_config

F32, U8 = jnp.dtype(jnp.float32), jnp.dtype(jnp.uint8)
X, D, F = 3, 64, 32
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 40,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_local_experts": X,
    "num_experts_per_tok": 2,
}
PACKED: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
# The 16 values by their bits, sign first.
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES += [-each for each in VALUES]


def packed(rows: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and scales of every kind of value, drawn."""
    rng = np.random.default_rng(rows)
    blocks = rng.integers(0, 256, (X, rows, inputs // 32, 16), np.uint8)
    return blocks, rng.integers(110, 140, (X, rows, inputs // 32), np.uint8)


def written_out(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[X, rows, inputs], value by value."""
    out = np.zeros((*scales.shape, 32), np.float32)
    for place in np.ndindex(*blocks.shape):
        *group, byte = place
        for half, bits in enumerate((blocks[place] % 16, blocks[place] // 16)):
            scale = 2.0 ** (int(scales[tuple(group)]) - 127)
            out[(*group, 2 * byte + half)] = VALUES[bits] * scale
    return out.reshape(*scales.shape[:2], -1)


@pytest.mark.parametrize(("weight", "rows", "inputs"), [("gate_up", 2 * F, D), ("down", D, F)])
def test_weights_of_4_bits_are_those_written_out(weight, rows, inputs):
    small, plain = (
        getattr(specs(model_config(CONFIG | changes)).layers[0].mixture, weight)
        for changes in (PACKED, {})
    )
    blocks, scales = packed(rows, inputs)
    parts = small.weights.weight.parts + small.weights.scale.parts
    assert [part.shape for part in parts] == [blocks.shape, scales.shape]
    assert [part.name.rsplit("_", 1)[1] for part in parts] == ["blocks", "scales"]
    whole = written_out(blocks, scales).swapaxes(1, 2)
    arrays = GroupCoded(
        small.weights.weight.assemble([jnp.asarray(blocks)], U8),
        small.weights.scale.assemble([jnp.asarray(scales)], U8),
        codes=small.weights.codes,
    )
    assert arrays.weight.shape == small.weights.weight.shape
    assert arrays.scale.shape == small.weights.scale.shape
    found = jax.vmap(lambda each: each.expanded(F32))(arrays)
    np.testing.assert_array_equal(found, plain.kernel.assemble([jnp.asarray(whole)], F32))


def test_every_scale_is_a_power_of_two():
    scales = jnp.arange(1, 255, dtype=jnp.uint8)  # the last one means no number
    ones = GroupCoded(jnp.full((16, 254), 0x22, jnp.uint8), scales[None], codes=E2M1)
    expected = np.ldexp(np.float32(1), np.arange(1, 255) - 127)
    np.testing.assert_array_equal(ones.expanded(F32), np.tile(expected, (32, 1)))


def test_random_experts_are_about_as_large_as_other_weights():
    mixture = specs(model_config(CONFIG | PACKED)).layers[0].mixture
    weights = jax.tree.map(lambda spec: spec.random(jax.random.key(0), U8), mixture.gate_up.weights)
    kernels = jax.vmap(lambda each: each.expanded(F32))(weights)
    assert 0.01 < float(jnp.std(kernels)) < 0.04


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, ["'awq'"]),
        ({"hidden_act": "gelu_pytorch_tanh"}, ["hidden_act", "silu"]),
        ({"swiglu_limit": 0}, ["swiglu_limit", "0"]),
        ({"num_experts_per_tok": 4}, ["num_experts_per_tok 4", "3"]),
        ({**PACKED, "intermediate_size": 40}, ["MXFP4", "32", "40"]),
    ],
)
def test_refusals_name_the_setting(changes, words):
    with pytest.raises(ConfigError) as error:
        specs(model_config(CONFIG | changes))
    assert all(word in str(error.value) for word in words)


def test_gate_and_up_are_clamped_and_up_counts_from_one():
    both = jnp.asarray([[[9.0, -9.0, 1.0], [9.0, 0.0, -9.0]]])
    out = gate(both, ClampedSwiglu(alpha=2.0, limit=3.0))
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    expected = [3 * sigmoid(6) * 4, -9 * sigmoid(-18), sigmoid(2) * -2]
    np.testing.assert_allclose(out[0], expected, rtol=1e-5)
