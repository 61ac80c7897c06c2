"""Every family against Hugging Face transformers, and against itself however it is driven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.loading import ModelSource, resolve_model
from paged.models.weights import for_device
from tests.models.harness import (
    GOLDENS,
    Runner,
    load_golden,
    one_golden_a_family,
    write_checkpoint,
)

NAMES = sorted(path.stem for path in GOLDENS.glob("*.json"))
FAMILIES = one_golden_a_family()
TOLERANCE = 1e-4
# Errors of bfloat16, as multiples of those that transformers makes.
MOST_MEAN, MOST_MAX = 1.5, 2.0
# Served in bfloat16 by the quick tests.
QUICK = ("llama", "qwen2_window", "qwen3_moe", "gemma2", "deepseek_v3")
ROUTERS = (".gate.weight", ".router.weight")
FEW = 2  # of 72 tokens
NEIGHBOUR = 1  # the slot of another sequence


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def golden(name: str) -> dict[str, Any]:
    return load_golden(name)


@pytest.fixture
def model(golden: dict[str, Any], tmp_path: Path) -> ModelSource:
    return resolve_model(write_checkpoint(tmp_path, golden))


def chosen(table: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Log-probability of each token after the first, from the rows [T, V] before it."""
    return table[np.arange(len(tokens) - 1), tokens[1:]]


def decode_greedily(
    runner: Runner, first: int, count: int, *, num_tokens: int | None = None
) -> list[int]:
    tokens = [first]
    while len(tokens) < count:
        logprobs = runner.step({0: tokens[-1:]}, num_tokens=num_tokens)
        tokens.append(int(logprobs[0].argmax()))
    return tokens


def test_agrees_with_transformers(name, golden, model):
    """Its variants are decoded by the program for chunks: one less to compile for each."""
    runner = Runner(model.config, model.load(jnp.float32, progress=False))
    prompt = golden["prompt"]
    table = np.concatenate(
        [runner.step({0: prompt[:40]}), runner.step({0: prompt[40:]}, num_tokens=40)]
    )
    logprobs = chosen(table, prompt)
    np.testing.assert_allclose(logprobs, golden["prompt_logprobs"], atol=TOLERANCE, rtol=0)
    padded = None if name in FAMILIES else 40
    first, count = int(table[-1].argmax()), len(golden["greedy"])
    greedy = decode_greedily(runner, first, count, num_tokens=padded)
    assert greedy == golden["greedy"]


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral_window", "qwen2_window", "qwen3", "qwen3_moe", "gemma3"),
        *("deepseek_v2", "deepseek_v3"),
    ],
)
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


@pytest.mark.parametrize("page_size", [1, 32])
def test_the_page_size_changes_nothing(page_size: int, tmp_path: Path) -> None:
    golden = load_golden("deepseek_v2")
    source = resolve_model(write_checkpoint(tmp_path, golden))
    params = source.load(jnp.dtype(jnp.float32), progress=False)
    runner = Runner(source.config, params, page_size=page_size)
    check_served(golden, served_logprobs(runner, golden, pad_decode=True), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_pages_of_one_token_change_nothing(name, tmp_path):
    golden = load_golden(name)
    source = resolve_model(write_checkpoint(tmp_path, golden))
    runner = Runner(source.config, source.load(jnp.float32, progress=False), page_size=1)
    prompt = golden["prompt"]
    table = np.concatenate([runner.step({0: prompt[a : a + 19]}) for a in range(0, 57, 19)])
    logprobs = chosen(table, prompt)
    np.testing.assert_allclose(logprobs, golden["prompt_logprobs"], atol=TOLERANCE, rtol=0)


def served_runner(golden: dict[str, Any], folder: Path, dtype: str, backend: str) -> Runner:
    """The model as an engine would run it on this machine's device."""
    source = resolve_model(write_checkpoint(folder, golden))
    params = for_device(source.load(jnp.dtype(dtype), progress=False), jax.devices()[0])
    return Runner(source.config, params, page_size=16, kv_dtype=dtype, backend=backend)


def chunks(golden: dict[str, Any]) -> list[dict[int, list[int]]]:
    """Two steps for the prompt: beside a neighbour's chunk, then beside its next token."""
    prompt = golden["prompt"]
    other = prompt[::-1]
    return [{0: prompt[:40], NEIGHBOUR: other[:20]}, {0: prompt[40:], NEIGHBOUR: other[20:21]}]


def served_logprobs(
    runner: Runner, golden: dict[str, Any], *, pad_decode: bool = False
) -> np.ndarray:
    """Log-probabilities of all tokens after the first, in chunks and then one by one.

    With `pad_decode` decode steps are run by the program for chunks: one less to compile.
    """
    table = [runner.step(rows, num_tokens=64)[: len(rows[0])] for rows in chunks(golden)]
    for token in golden["greedy"][:-1]:
        rows = {0: [token], NEIGHBOUR: [token]}
        table.append(runner.step(rows, num_tokens=64 if pad_decode else None)[:1])
    return chosen(np.concatenate(table), golden["prompt"] + golden["greedy"])


def check_served(golden: dict[str, Any], logprobs: np.ndarray, dtype: str) -> None:
    """Against transformers in float32: exact in float32, else as near as transformers comes.

    In a mixture any rounding may send a token that is between two experts to the other one, so that
    a few may differ by more.
    """
    error = np.sort(np.abs(logprobs - (golden["prompt_logprobs"] + golden["greedy_logprobs"])))
    if dtype != "float32" and any(name.endswith(ROUTERS) for name in golden["tensors"]):
        error = error[:-FEW]
    theirs = golden["bfloat16_error"]
    mean, most = MOST_MEAN * theirs["mean"], MOST_MAX * theirs["max"]
    if dtype == "float32":
        mean = most = TOLERANCE
    assert error.mean() <= mean, f"mean error {error.mean():.2g}, allowed {mean:.2g}"
    assert error.max() <= most, f"largest error {error.max():.2g}, allowed {most:.2g}"


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *((name, "bfloat16", "xla") for name in QUICK),
        pytest.param("deepseek_v2", "bfloat16", "triton", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "float32", "triton", marks=pytest.mark.slow),
        pytest.param("gemma2", "bfloat16", "triton", marks=pytest.mark.slow),
        pytest.param("llama_wide", "bfloat16", "triton", marks=pytest.mark.slow),
        pytest.param("mistral_window", "float32", "triton", marks=pytest.mark.slow),
        pytest.param("qwen3", "bfloat16", "triton", marks=pytest.mark.slow),
        *(
            pytest.param(name, "bfloat16", "xla", marks=pytest.mark.slow)
            for name in FAMILIES
            if name not in QUICK
        ),
    ],
)
def test_agrees_as_served(name, dtype, backend, tmp_path):
    golden = load_golden(name)
    runner = served_runner(golden, tmp_path, dtype, backend)
    check_served(golden, served_logprobs(runner, golden), dtype)
