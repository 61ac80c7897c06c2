"""Checkpoints that the formats' own tools wrote give what transformers computes with them."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.loading import CheckpointError, resolve_model
from paged.models.loading.bitsandbytes import BitsandbytesCheckpoint
from paged.models.loading.safetensors import SafetensorsCheckpoint
from paged.models.quantized import ChannelScaled, GroupCoded, GroupScaled, plain_kernel
from tests.models.harness import Runner

GOLDENS = Path(__file__).parent / "goldens"
F32 = jnp.dtype(jnp.float32)


@pytest.mark.parametrize(
    ("name", "kind", "most"),
    [
        ("nf4", GroupCoded, 2e-4),
        ("nf4_double", GroupCoded, 2e-4),
        ("llm_int8", GroupScaled, 2e-4),
        ("packed", GroupScaled, 2e-4),
        # These multiply in 8 bits here, and in full precision in the reference.
        ("integers", ChannelScaled, 0.1),
        ("floats", ChannelScaled, 0.3),
    ],
)
def test_answers_are_those_of_the_reference(name, kind, most):
    golden = json.loads((GOLDENS / name / "expected.json").read_text(encoding="utf-8"))
    source = resolve_model(GOLDENS / name)
    params = source.load(F32, progress=False)
    assert type(params.layers[0].qkv) is type(params.layers[0].down) is kind
    tokens = golden["prompt"]
    logprobs = Runner(source.config, params).step({0: tokens})
    found = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(found, golden["logprobs"], atol=most)


def test_random_weights_of_nf4_are_near_those_that_were_drawn():
    dummy = resolve_model(GOLDENS / "nf4", load_format="dummy")
    weight = dummy.load(F32).layers[0].down
    assert 0.015 < float(jnp.std(plain_kernel(weight, F32))) < 0.025
    assert len(jax.tree.leaves(weight)) == 2


@pytest.mark.parametrize("offset", [0, 0.0, True, "0", None])
def test_an_offset_that_json_writes_as_an_integer(offset, monkeypatch):
    wrapped = BitsandbytesCheckpoint(SafetensorsCheckpoint(GOLDENS / "nf4_double"))
    monkeypatch.setattr(
        wrapped, "_state", lambda _: {"nested_blocksize": 256} | {"nested_offset": offset}
    )
    name = "model.layers.0.mlp.down_proj.weight.scales"
    if offset == 0 and offset is not False:
        assert wrapped.read(name).ndim == 1
        return
    with pytest.raises(CheckpointError, match="nested_offset"):
        wrapped.read(name)


def test_scales_of_another_kind_are_refused():
    checkpoint = SafetensorsCheckpoint(GOLDENS / "llm_int8")
    wrapped = BitsandbytesCheckpoint(checkpoint)
    with pytest.raises(CheckpointError, match="NF4 is supported"):
        wrapped.read("model.layers.0.mlp.down_proj.weight.scales")
