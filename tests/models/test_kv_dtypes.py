"""What pages of 8 bits change in a model's answers: little, and alike however it is driven."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.loading import resolve_model
from tests.models.harness import Runner, load_golden, write_checkpoint

# Mean of |difference| of log-probabilities, twice what these models show.
LIMITS = {"int8": 0.01, "fp8": 0.1, "fp8_e5m2": 0.2}


@pytest.mark.parametrize("kv_dtype", LIMITS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_log_probabilities_stay_close(name: str, kv_dtype: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    source = resolve_model(write_checkpoint(tmp_path, golden))
    params = source.load(jnp.dtype(jnp.float32), progress=False)
    prompt = golden["prompt"]

    def run(dtype: str, *chunks: list[int]) -> np.ndarray:
        runner = Runner(source.config, params, kv_dtype=dtype)
        return np.concatenate([runner.step({0: chunk}) for chunk in chunks])

    exact, close = run("float32", prompt), run(kv_dtype, prompt)
    difference = np.abs(close - exact).mean()
    assert 0 < difference < LIMITS[kv_dtype]
    in_chunks = run(kv_dtype, prompt[:40], prompt[40:])
    np.testing.assert_allclose(in_chunks, close, atol=1e-4)
