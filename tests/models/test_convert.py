"""Models in the engine's own layout: the same to the last bit, and refused unless whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tokenizers

from paged.errors import ConfigError
from paged.models.embedder import Embedder
from paged.models.loading import CheckpointError, ModelNotFoundError, resolve_model
from paged.models.loading.bodies import load_embedder
from paged.models.loading.convert import _new_folder, convert
from paged.models.loading.converted import param_names
from paged.models.loading.params import load_param
from paged.models.pooling import Pooling
from tests.models.harness import load_golden, write_checkpoint

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
FAMILIES = ["llama_tied", "qwen2", "qwen3_moe", "gpt_oss", "phi3", "cohere", "starcoder2"]


def assert_same(left: Any, right: Any) -> None:
    def check(one: jax.Array, other: jax.Array) -> None:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

    jax.tree.map(check, left, right)


def converted(tmp_path: Path, golden: str = "llama", dtype: jnp.dtype = F32) -> Path:
    source = resolve_model(write_checkpoint(tmp_path / "model", load_golden(golden)))
    convert(source, tmp_path / "out", dtype, show_progress=False)
    return tmp_path / "out"


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_the_same_model(name: str, tmp_path: Path) -> None:
    out = converted(tmp_path, name)
    before, after = resolve_model(tmp_path / "model"), resolve_model(out)
    assert after.config == before.config
    for dtype in (F32, BF16):
        assert_same(after.load(dtype, progress=False), before.load(dtype, progress=False))


def test_orbax_reads_it(tmp_path: Path) -> None:
    out = converted(tmp_path, "qwen2", BF16)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(out / "params")
    source = resolve_model(out)
    params = jax.tree.leaves(source.load(BF16, progress=False))
    expected = dict(zip(param_names(source.specs), params, strict=True))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


def test_dtype_is_that_asked_for(tmp_path: Path) -> None:
    source = resolve_model(converted(tmp_path, dtype=BF16))
    assert source.config.dtype == "bfloat16"
    before = resolve_model(tmp_path / "model").load(BF16, progress=False)
    assert_same(source.load(BF16, progress=False), before)
    wide = jax.tree.map(lambda param: param.astype(F32), before)
    assert_same(source.load(F32, progress=False), wide)


def test_a_parameter_keeps_the_dtype_that_is_its_own(tmp_path: Path) -> None:
    out = converted(tmp_path, "deepseek_v3", BF16)
    before, after = resolve_model(tmp_path / "model"), resolve_model(out)
    params = after.load(BF16, progress=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {BF16, F32}
    assert_same(params, before.load(BF16, progress=False))


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_its_body_makes_vectors(name: str, tmp_path: Path) -> None:
    sources = [resolve_model(converted(tmp_path, name)), resolve_model(tmp_path / "model")]
    ours, theirs = (
        load_embedder(Embedder(source.config, Pooling("mean")), source, F32, progress=False)
        for source in sources
    )
    assert_same(ours, theirs)


def test_encoders_stay_as_they_are(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", load_golden("embedders/bert"))
    with pytest.raises(ConfigError, match="BertModel is an encoder"):
        convert(resolve_model(folder), tmp_path / "out", F32)


def test_a_converted_model_can_be_converted(tmp_path: Path) -> None:
    out = converted(tmp_path)
    convert(resolve_model(out), tmp_path / "again", BF16, show_progress=False)
    again = resolve_model(tmp_path / "again").load(BF16, progress=False)
    assert_same(again, resolve_model(out).load(BF16, progress=False))


def test_a_gguf_file_can_be_converted(tmp_path: Path) -> None:
    demo = resolve_model(None)
    convert(demo, tmp_path / "out", BF16, show_progress=False)
    after = resolve_model(tmp_path / "out")
    assert after.config == demo.config
    assert_same(after.load(BF16, progress=False), demo.load(BF16, progress=False))
    ours, theirs = after.tokenizer(), demo.tokenizer()
    assert ours.special_tokens == theirs.special_tokens
    assert ours.chat_templates == theirs.chat_templates
    assert ours.eos_token_ids == theirs.eos_token_ids
    text = "Hello <|im_start|>wörld\n  123 <|endoftext|>"
    assert ours.encode(text) == theirs.encode(text)


def test_what_describes_the_model_comes_along(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", load_golden("llama"))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<e>": 1}, []))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (folder / "pytorch_model.bin").write_text("")
    convert(resolve_model(folder), tmp_path / "out", F32, show_progress=False)
    shutil.rmtree(folder)
    after = resolve_model(tmp_path / "out")
    assert after.generation_config == {"temperature": 0.5}
    assert after.tokenizer().chat_templates == {"default": "{{ messages }}", "rag": "rag"}
    assert after.tokenizer().encode("a") == [0]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not names & {"pytorch_model.bin", "model.safetensors"}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", load_golden("llama"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out exists"):
        convert(resolve_model(folder), tmp_path / "out", F32)
    with pytest.raises(ConfigError, match="model exists"):
        convert(resolve_model(folder), folder, F32)
    assert resolve_model(folder).load(F32, progress=False)


def test_a_disk_that_is_too_small_is_found_out_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"0\.0 GB, and .* has 0\.0 GB"):
        converted(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("error", "told"), [(KeyboardInterrupt, KeyboardInterrupt), (OSError, ConfigError)]
)
def test_an_interrupted_conversion_leaves_nothing(
    error: type[BaseException],
    told: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def fail_late(spec: Any, *how: Any) -> jax.Array:
        seen.append(spec)
        if len(seen) == 5:
            raise error("enough")
        return load_param(spec, *how)

    monkeypatch.setattr("paged.models.loading.convert.load_param", fail_late)
    with pytest.raises(told, match="enough"):
        converted(tmp_path)
    assert len(seen) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_killed_conversion_is_no_model(tmp_path: Path) -> None:
    """Its folder still has another name, whatever it holds; and nothing writes into it again."""
    out = converted(tmp_path)
    left = out.rename(tmp_path / "out.unfinished")
    with pytest.raises(CheckpointError, match="interrupted; convert the model again"):
        resolve_model(left)
    with pytest.raises(ConfigError, match=r"out\.unfinished is of a conversion"):
        convert(resolve_model(tmp_path / "model"), out, F32)


def test_of_two_conversions_the_second_leaves_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it begins before there is a folder that it could see."""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    first = tmp_path / "out.unfinished"
    first.mkdir()
    (first / "mine").write_text("")
    for _ in range(2):
        refused = pytest.raises(ConfigError, match=r"out\.unfinished is of a conversion")
        with refused, _new_folder(tmp_path / "out", 1):
            raise AssertionError("there is one already")
        assert [path.name for path in first.iterdir()] == ["mine"]


@pytest.mark.parametrize("version", ["1", "null", '"1"', "[]"])
def test_another_layout_is_refused_by_its_version(version: str, tmp_path: Path) -> None:
    out = converted(tmp_path)
    (out / "paged.json").write_text(f'{{"version": {version}}}')
    with pytest.raises(CheckpointError, match=r"layout version .*reads version 2: convert"):
        resolve_model(out)


def test_a_layout_that_is_not_json(tmp_path: Path) -> None:
    out = converted(tmp_path)
    (out / "paged.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"paged\.json cannot be read"):
        resolve_model(out)


def test_a_folder_without_its_configuration(tmp_path: Path) -> None:
    out = converted(tmp_path)
    (out / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(out)


def test_an_architecture_that_nobody_runs(tmp_path: Path) -> None:
    out = converted(tmp_path)
    config = json.loads((out / "config.json").read_text()) | {"architectures": ["NoSuchModel"]}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'NoSuchModel' is not supported"):
        resolve_model(out)


def refuse(out: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        resolve_model(out).load(F32, progress=False)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    out = converted(tmp_path)
    array = out / "params" / "layers.1.qkv.kernel"
    [elements] = [path for path in array.iterdir() if path.name != ".zarray"]
    whole, description = elements.read_bytes(), (array / ".zarray").read_text()
    elements.write_bytes(whole[:-1])
    refuse(out, f"has {len(whole) - 1} bytes, and its array needs {len(whole)}")
    elements.unlink()
    refuse(out, f"has 0 bytes, and its array needs {len(whole)}")
    elements.write_bytes(whole)
    fields = json.loads(description)
    for other in (
        fields | {"compressor": {"id": "zstd", "level": 1}},
        fields | {"order": "F"},
        fields | {"dtype": ">f4"},
        fields | {"chunks": [1, *fields["chunks"][1:]]},
    ):
        (array / ".zarray").write_text(json.dumps(other))
        refuse(out, "in pieces, compressed or of swapped bytes")
    for text in (
        "{",
        "{}",
        json.dumps(fields | {"dtype": "none"}),
        json.dumps(fields | {"shape": 3}),
        json.dumps(fields | {"shape": [float("inf")]}),
    ):
        (array / ".zarray").write_text(text)
        refuse(out, "does not describe an array")
    shutil.rmtree(array)
    refuse(out, r"lacks tensor 'layers\.1\.qkv\.kernel'")
    shutil.rmtree(out / "params")
    refuse(out, "params holds no parameters")


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    out = converted(tmp_path)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    refuse(out, r"tensor 'head\.kernel' that the model has no place for")
    (out / "config.json").write_text(json.dumps(config | {"vocab_size": 77}))
    refuse(out, r"embedding\.table.*has shape \[128, 64\], expected \[77, 64\]")


_SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from paged.models.loading import resolve_model
from paged.models.loading.params import load_params
from paged.models.weights import param_shardings

mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))

def fitting(spec, sharding):  # tiny models have odd sizes
    axes = [axis if size % 2 == 0 else None for axis, size in zip(sharding.spec, spec.shape)]
    return NamedSharding(mesh, PartitionSpec(*axes))

for folder in sys.argv[1:]:
    source = resolve_model(folder)
    shardings = jax.tree.map(fitting, source.specs, param_shardings(source.specs, mesh))
    whole = source.load(jnp.bfloat16, progress=False)
    specs, checkpoint = source.open()
    dtype = jnp.dtype(jnp.bfloat16)
    spread = load_params(specs, checkpoint, dtype, show_progress=False, sharding=shardings)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(spread))
    for one, other, target in zip(*map(jax.tree.leaves, (whole, spread, shardings)), strict=True):
        assert other.sharding == target
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
"""


def test_any_number_of_devices_can_load_it(tmp_path: Path) -> None:
    """Converted or not, each parameter lies as its sharding says."""
    folders = []
    for name in ("llama", "qwen3_moe", "gpt_oss"):
        folders += [converted(tmp_path / name, name), tmp_path / name / "model"]
    flags = "--xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    argv = [sys.executable, "-c", _SHARDED, *map(str, folders)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
