"""Every family on a GPU, by the kernels that serve there, against Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from paged.attention import default_backend
from tests.models.harness import load_golden
from tests.models.test_goldens import NAMES, check_served, chunks, served_logprobs, served_runner

pytestmark = [
    pytest.mark.gpu,
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_agrees_with_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    """In float32 without rounding what is multiplied, as XLA would."""
    golden = load_golden(name)
    runner = served_runner(golden, tmp_path, dtype, default_backend(jax.devices()[0]))
    if dtype == "bfloat16":
        logprobs = served_logprobs(runner, golden)
    else:
        with jax.default_matmul_precision("highest"):
            logprobs = served_logprobs(runner, golden, pad_decode=True)
    check_served(golden, logprobs, dtype)


def test_a_model_of_some_width_runs_by_our_own_kernels(tmp_path: Path) -> None:
    """Smaller models are left to other kernels, so that this one alone speaks for these."""
    backend = default_backend(jax.devices()[0])
    if backend != "mosaic":
        pytest.skip("needs a Hopper GPU")
    golden = load_golden("llama_wide")
    runner = served_runner(golden, tmp_path, "bfloat16", backend)
    text = runner.program(chunks(golden)[0], num_tokens=64)
    for kernel in ("paged_prefill_mosaic", "paged_decode", "paged_matmul", "paged_matmul_gated"):
        assert f"/{kernel}/" in text
    assert "xla.gpu.triton" not in text, "a kernel for other GPUs took the place of one for Hopper"
