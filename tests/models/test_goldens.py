"""Every family against Hugging Face transformers, and against itself however it is driven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.loading import ModelSource, resolve_model
from tests.models.harness import GOLDENS, Runner, load_golden, write_checkpoint

NAMES = sorted(path.stem for path in GOLDENS.glob("*.json"))
TOLERANCE = 1e-4


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load_golden(request.param)


@pytest.fixture
def model(golden: dict[str, Any], tmp_path: Path) -> ModelSource:
    return resolve_model(write_checkpoint(tmp_path, golden))


def chosen(table: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Log-probability of each token after the first, from the rows [T, V] before it."""
    return table[np.arange(len(tokens) - 1), tokens[1:]]


def decode_greedily(runner: Runner, first: int, count: int) -> list[int]:
    tokens = [first]
    while len(tokens) < count:
        tokens.append(int(runner.step({0: tokens[-1:]})[0].argmax()))
    return tokens


def test_agrees_with_transformers(golden, model):
    runner = Runner(model.config, model.load(jnp.float32, progress=False))
    prompt = golden["prompt"]
    table = np.concatenate(
        [runner.step({0: prompt[:40]}), runner.step({0: prompt[40:]}, num_tokens=40)]
    )
    logprobs = chosen(table, prompt)
    np.testing.assert_allclose(logprobs, golden["prompt_logprobs"], atol=TOLERANCE, rtol=0)
    greedy = decode_greedily(runner, int(table[-1].argmax()), len(golden["greedy"]))
    assert greedy == golden["greedy"]


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2_window", "qwen3"])
def test_chunks_and_neighbours_change_nothing(name, tmp_path):
    golden = load_golden(name)
    source = resolve_model(write_checkpoint(tmp_path, golden))
    params = source.load(jnp.float32, progress=False)
    prompt, other = golden["prompt"], golden["prompt"][::-1]

    runner = Runner(source.config, params)
    runner.step({1: other[:20], 0: []}, num_tokens=40)
    table, start = [], 0
    for size in (1, 3, 16, 36, 1):  # a single token decodes beside the other's chunk
        rows = {0: prompt[start : start + size], 1: other[20 + start :][:1]}
        table.append(runner.step(rows, num_tokens=40)[:size])
        start += size
    assert start == len(prompt)
    logprobs = chosen(np.concatenate(table), prompt)
    np.testing.assert_allclose(logprobs, golden["prompt_logprobs"], atol=TOLERANCE, rtol=0)
