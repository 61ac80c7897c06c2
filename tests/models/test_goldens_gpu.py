"""Every family on a GPU, by the kernels that serve there, against Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from paged.attention import default_backend
from tests.models.harness import load_golden
from tests.models.test_goldens import NAMES, check_served, chunks, served_logprobs, served_runner

pytestmark = [
    pytest.mark.gpu,
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
DTYPES = ("bfloat16", "float32")

Answers = dict[tuple[str, str], Future[np.ndarray]]


def answer(name: str, dtype: str, folder: Path) -> np.ndarray:
    """See `served_logprobs`; in float32 without rounding what is multiplied, as XLA would."""
    golden = load_golden(name)
    runner = served_runner(golden, folder, dtype, default_backend(jax.devices()[0]))
    if dtype == "bfloat16":
        return served_logprobs(runner, golden)
    with jax.default_matmul_precision("highest"):
        return served_logprobs(runner, golden, pad_decode=True)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """Those of all models, which are compiled side by side: that takes nearly all of the time."""
    threads = ThreadPoolExecutor()
    yield {
        (name, dtype): threads.submit(answer, name, dtype, tmp_path_factory.mktemp(name))
        for name in NAMES
        for dtype in DTYPES
    }
    threads.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_transformers(name: str, dtype: str, answers: Answers) -> None:
    check_served(load_golden(name), answers[name, dtype].result(), dtype)


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
