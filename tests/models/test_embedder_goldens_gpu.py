"""Models for vectors and scores on a GPU, by the kernels that serve there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from paged.attention import default_backend
from paged.models.weights import for_device
from tests.models.test_embedder_goldens import NAMES, TOLERANCE, compute, expected, golden_of, load

pytestmark = [
    pytest.mark.gpu,
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """In float32 without rounding what is multiplied, as XLA would."""
    golden = golden_of(name)
    embedder, params = load(golden, tmp_path, "mean")
    device = jax.devices()[0]
    embedder = replace(embedder, backend=default_backend(device))
    with jax.default_matmul_precision("highest"):
        answers = compute(embedder, for_device(params, device), golden)
    kind = "logits" if embedder.scores else "mean"
    np.testing.assert_allclose(answers, expected(golden, kind), atol=TOLERANCE, rtol=0)
