"""What sentence-transformers writes beside a model, and what becomes of hidden states by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from paged.errors import ConfigError
from paged.models.embedder import Embedder
from paged.models.loading import resolve_model
from paged.models.loading.bodies import load_embedder
from paged.models.loading.modules import EmbeddingSettings, read_settings
from paged.models.pooling import DenseModule, Pooling, pool
from tests.models.harness import write_checkpoint
from tests.models.test_embedder_goldens import compute, expected, golden_of

MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
DENSE = {
    "in_features": 72,
    "out_features": 5,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_modules(folder: Path, *names: str, package: str = "sentence_transformers.models") -> None:
    folders = {"Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": folders.get(name, ""),
            "type": f"{package}.{name}",
        }
        for index, name in enumerate(names)
    ]
    write(folder, "modules.json", entries)


def listing(*names: str, path: str = "1_Pooling") -> list[dict[str, str]]:
    return [{"type": f"a.{name}", "path": path} for name in names]


def test_a_plain_folder_says_nothing(tmp_path):
    write(tmp_path, "config.json", {})
    assert read_settings(tmp_path) == EmbeddingSettings()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (MEAN, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True, "include_prompt": True}, "max"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 8}, "last"),
    ],
)
def test_the_pooling_of_a_list_of_modules(tmp_path, settings, kind):
    write_modules(tmp_path, "Transformer", "Pooling")
    write(tmp_path, "1_Pooling/config.json", settings)
    assert read_settings(tmp_path).pooling == Pooling(kind, normalize=False)


def test_all_modules_by_their_newer_names(tmp_path):
    package = "sentence_transformers.base.modules"
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Normalize", package=package)
    write(tmp_path, "1_Pooling/config.json", MEAN)
    write(tmp_path, "2_Dense/config.json", DENSE)
    dense = DenseModule("2_Dense", 72, 5, True, "Tanh")
    assert read_settings(tmp_path).pooling == Pooling("mean", (dense,), normalize=True)


def test_the_settings_of_texts(tmp_path):
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True})
    settings = read_settings(tmp_path)
    assert (settings.max_length, settings.lowercase) == (256, True)
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": None})
    assert read_settings(tmp_path).max_length is None


@pytest.mark.parametrize(
    ("config", "dimensions"),
    [
        ({"is_matryoshka": True}, None),
        ({"is_matryoshka": False}, ()),
        ({"matryoshka_dimensions": [64, 128]}, (64, 128)),
    ],
)
def test_to_what_vectors_may_be_cut(tmp_path, config, dimensions):
    write(tmp_path, "config.json", config)
    assert read_settings(tmp_path).dimensions == dimensions


@pytest.mark.parametrize(
    "config",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_what_scores_end_in(tmp_path, config):
    write(tmp_path, "config.json", config)
    assert read_settings(tmp_path).activation == "Identity"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules.json": {}}, ["modules.json", "{}"]),
        ({"modules.json": [{"path": ""}]}, ["modules.json", "'type'"]),
        (
            {"modules.json": [{"type": "a.b.WordEmbeddings", "path": ""}]},
            ["'WordEmbeddings'", "Pooling"],
        ),
        ({"modules.json": [{"type": "a.Transformer", "path": ""}]}, ["['Transformer']", "Pooling"]),
        ({"modules.json": listing("Transformer", "Pooling", "Pooling")}, ["in this order"]),
        ({"modules.json": listing("Transformer", "Dense", "Pooling")}, ["in this order"]),
        ({"modules.json": listing("Transformer", "Pooling", "Normalize", "Dense")}, ["order"]),
        ({"modules.json": listing("Pooling", "Transformer")}, ["in this order"]),
        ({"modules.json": listing("Transformer", "Pooling", path="\0")}, ["null byte"]),
        ({"modules.json": listing("Transformer", "Pooling", path="x" * 999)}, ["too long"]),
        ({"1_Pooling/config.json": {}}, ["nothing", "pooling_mode_mean_tokens"]),
        (
            {"1_Pooling/config.json": MEAN | {"pooling_mode_cls_token": True}},
            ["pooling_mode_cls_token and pooling_mode_mean_tokens"],
        ),
        ({"1_Pooling/config.json": {"pooling_mode_weightedmean_tokens": True}}, ["weightedmean"]),
        ({"1_Pooling/config.json": []}, ["1_Pooling", "JSON object"]),
        ({"2_Dense/config.json": DENSE | {"activation_function": "a.GELU"}}, ["'a.GELU'", "Tanh"]),
        ({"2_Dense/config.json": {}}, ["'in_features'"]),
        ({"sentence_bert_config.json": {"max_seq_length": -3}}, ["max_seq_length", "-3"]),
        ({"config.json": {"matryoshka_dimensions": 64}}, ["matryoshka_dimensions", "64"]),
        ({"config.json": {"sbert_ce_default_activation_function": 5}}, ["5", "Sigmoid"]),
    ],
)
def test_refusals_say_what_is_wrong(tmp_path, files, words):
    write_modules(tmp_path, "Transformer", "Pooling", "Dense")
    write(tmp_path, "1_Pooling/config.json", MEAN)
    write(tmp_path, "2_Dense/config.json", DENSE)
    for name, content in files.items():
        write(tmp_path, name, content)
    with pytest.raises(ConfigError) as error:
        read_settings(tmp_path)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("kind", "expected"), [("cls", [1, 2]), ("last", [5, 0]), ("max", [5, 4]), ("mean", [3, 2])]
)
def test_only_a_rows_own_places_count(kind, expected):
    hidden = jnp.array([[[1, 2], [3, 4], [5, 0], [99, 99]]], jnp.float32)
    assert pool(hidden, jnp.array([3]), kind).tolist() == [expected]


def test_vectors_pass_through_dense_layers(tmp_path):
    golden = golden_of("bert")
    write_checkpoint(tmp_path, golden)
    draw = np.random.RandomState(1)
    tensors = {
        "linear.weight": draw.standard_normal((5, 72)).astype(np.float32),
        "linear.bias": draw.standard_normal(5).astype(np.float32),
    }
    (tmp_path / "2_Dense").mkdir()
    save_file(tensors, tmp_path / "2_Dense/model.safetensors")
    module = DenseModule("2_Dense", 72, 5, True, "Tanh")
    source = resolve_model(tmp_path)
    embedder = Embedder(source.config, Pooling("mean", (module,), normalize=True))
    params = load_embedder(embedder, source, jnp.dtype("float32"), progress=False)
    assert embedder.size == 5
    wanted = np.tanh(expected(golden, "mean") @ tensors["linear.weight"].T + tensors["linear.bias"])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(compute(embedder, params, golden), wanted, atol=1e-4)
