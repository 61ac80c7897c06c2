"""The numbers that `benchmarks/quantized_accuracy.py` prints, on small arrays and a tiny model."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.quantized_accuracy import measure, predictions
from paged.models.loading import resolve_model
from tests.models.harness import Runner, load_golden, write_checkpoint

F32 = jnp.dtype(jnp.float32)


def test_distributions_are_compared_with_those_in_full_precision() -> None:
    expected = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]]))
    found = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]]))
    same = measure("plain", 8, expected, expected, [2, 1])
    assert (same.divergence, same.agreement) == (0, 1)
    assert same.perplexity == pytest.approx(4)
    other = measure("int4", 8, found, expected, [2, 1])
    assert other.perplexity == pytest.approx(2)
    assert other.divergence == pytest.approx(0.25 * np.log(2) / 2)
    assert other.agreement == 0.5
    assert other.row() == "| int4 | 0.0 | 2.000 | 0.08664 | 50.0% |"


def test_predictions_are_those_of_the_model(tmp_path: Path) -> None:
    source = resolve_model(write_checkpoint(tmp_path, load_golden("llama")))
    tokens = list(range(3, 40))
    expected = Runner(source.config, source.load(F32, progress=False)).step({0: tokens})
    found, small = predictions(source, tokens, F32, None, "fp8")
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert 0 < np.abs(small - expected).max() < 1
