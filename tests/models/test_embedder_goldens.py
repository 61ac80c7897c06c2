"""Models for vectors and scores against Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models import encoder
from paged.models.embedder import Embedder, EmbedderParams
from paged.models.loading import CheckpointError, resolve_model
from paged.models.loading.bodies import load_embedder
from paged.models.pooling import Pooling
from tests.models.harness import GOLDENS, load_golden, write_checkpoint

NAMES = sorted(path.stem for path in (GOLDENS / "embedders").glob("*.json"))
TOLERANCE = 1e-4
LENGTH = 48  # of the rows, longer than every text


def golden_of(name: str) -> dict[str, Any]:
    return load_golden(f"embedders/{name}")


def load(golden: dict[str, Any], folder: Path, kind: Any) -> tuple[Embedder, EmbedderParams]:
    source = resolve_model(write_checkpoint(folder, golden))
    embedder = Embedder(source.config, Pooling(kind, normalize=False))
    return embedder, load_embedder(embedder, source, jnp.dtype("float32"), progress=False)


def compute(embedder: Embedder, params: EmbedderParams, golden: dict[str, Any]) -> np.ndarray:
    """The answers for all texts, side by side and with an empty row behind them."""
    texts = golden["texts"]
    tokens, types = np.zeros((2, len(texts) + 1, LENGTH), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text["tokens"])] = text["tokens"]
        types[row, : len(text["types"])] = text["types"]
    lengths = np.array([*(len(text["tokens"]) for text in texts), 1], np.int32)
    return np.asarray(jax.jit(embedder)(params, tokens, types, lengths))[:-1]


def expected(golden: dict[str, Any], kind: str) -> np.ndarray:
    return np.array([text[kind] for text in golden["texts"]])


@pytest.mark.parametrize("kind", ["cls", "last", "mean"])
@pytest.mark.parametrize("name", [name for name in NAMES if "score" not in name])
def test_vectors_agree_with_transformers(name, kind, tmp_path):
    golden = golden_of(name)
    vectors = compute(*load(golden, tmp_path, kind), golden)
    np.testing.assert_allclose(vectors, expected(golden, kind), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [name for name in NAMES if "score" in name])
def test_scores_agree_with_transformers(name, tmp_path):
    golden = golden_of(name)
    embedder, params = load(golden, tmp_path, "cls")
    assert embedder.scores
    np.testing.assert_allclose(
        compute(embedder, params, golden), expected(golden, "logits"), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("name", ["bert", "qwen3_body"])
def test_names_may_have_the_prefix_that_a_head_gives_them(name, tmp_path):
    """And heads that vectors do not need are left alone."""
    golden = golden_of(name)
    prefix, head = {"bert": ("bert.", "cls.bias"), "qwen3_body": ("model.", "lm_head.bias")}[name]
    tensors = {f"{prefix}{key}": shape for key, shape in golden["tensors"].items()}
    renamed = golden | {"tensors": tensors | {head: [7]}}
    _, params = load(renamed, tmp_path, "mean")
    loaded = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert loaded == sum(np.prod(shape) for shape in golden["tensors"].values())


def test_a_tensor_that_no_head_has_is_refused(tmp_path):
    golden = golden_of("bert")
    strange = golden | {"tensors": golden["tensors"] | {"encoder.layer.0.adapter.weight": [3]}}
    with pytest.raises(CheckpointError, match=r"bert\.encoder\.layer\.0\.adapter\.weight"):
        load(strange, tmp_path, "mean")


def test_attention_in_several_turns_is_the_same(monkeypatch):
    draw = np.random.RandomState(0)
    q, k, v = draw.standard_normal((3, 2, 16, 3, 8)).astype(np.float32)
    lengths = jnp.array([5, 16], jnp.int32)
    whole = encoder.attend(q, k, v, lengths)
    monkeypatch.setattr(encoder, "_MOST_SCORES", 2 * 3 * 16 * 4)
    np.testing.assert_allclose(encoder.attend(q, k, v, lengths), whole, atol=1e-6)
    monkeypatch.setattr(encoder, "_MOST_SCORES", 1)
    np.testing.assert_allclose(encoder.attend(q, k, v, lengths), whole, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "roberta_score", "qwen3_body"])
def test_texts_do_not_see_each_other_nor_padding(name, tmp_path):
    golden = golden_of(name)
    embedder, params = load(golden, tmp_path, "mean")
    together = compute(embedder, params, golden)
    alone = [compute(embedder, params, golden | {"texts": [text]})[0] for text in golden["texts"]]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-5)
