"""gpt-oss: its experts' weights in 4 bits are those of the same checkpoint written out."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from paged.errors import ConfigError
from paged.models.activations import ClampedSwiglu, gate
from paged.models.gpt_oss import specs
from paged.models.mxfp4 import expanded
from paged.models.registry import model_config

F32 = jnp.dtype(jnp.float32)
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
        getattr(specs(model_config(CONFIG | changes)).layers[0].mixture, weight).kernel
        for changes in (PACKED, {})
    )
    blocks, scales = packed(rows, inputs)
    assert [part.shape for part in small.parts] == [blocks.shape, scales.shape]
    assert [part.name.rsplit("_", 1)[1] for part in small.parts] == ["blocks", "scales"]
    whole = written_out(blocks, scales).swapaxes(1, 2)
    assert [part.shape for part in plain.parts] == [whole.shape]
    arrays = small.assemble([jnp.asarray(blocks), jnp.asarray(scales)], F32)
    assert arrays.shape == small.shape == plain.shape
    assert small.axes == plain.axes
    np.testing.assert_array_equal(arrays, plain.assemble([jnp.asarray(whole)], F32))


def test_every_scale_is_a_power_of_two():
    scales = np.arange(255, dtype=np.uint8)[:, None]  # the last one means no number
    blocks = np.full((255, 1, 16), 0x22, np.uint8)  # ones
    expected = np.ldexp(np.float32(1), scales.astype(np.int32) - 127) * np.ones(32, np.float32)
    normal = scales[:, 0] > 0  # what a CPU may flush to zero is beside the point
    found = expanded(jnp.asarray(blocks), jnp.asarray(scales))
    np.testing.assert_array_equal(found[normal], expected[normal])


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
