"""The safetensors reader: every dtype as a view, every kind of damage named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from paged.models.loading.checkpoint import CheckpointError
from paged.models.loading.safetensors import SafetensorsCheckpoint, SafetensorsFile


def write_raw(path: Path, header: Any, data: bytes, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), end: int = 8) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, end]}}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("F64", np.float64),
        ("F32", np.float32),
        ("F16", np.float16),
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("I64", np.int64),
        ("I32", np.int32),
        ("I16", np.int16),
        ("I8", np.int8),
        ("U8", np.uint8),
        ("BOOL", np.bool_),
    ],
)
def test_reads_every_dtype_as_a_view(tmp_path, name, dtype):
    values = np.array([[0, 1, 2], [1, 0, 3]]).astype(dtype)
    header = {"__metadata__": {"format": "pt"}} | entry(name, values.shape, values.nbytes)
    read = SafetensorsFile(write_raw(tmp_path / "a", header, values.tobytes())).read("x")
    assert read.dtype == values.dtype
    assert not read.flags.owndata
    np.testing.assert_array_equal(read, values)


def test_agrees_with_the_library(tmp_path):
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "empty": np.zeros((0, 4), "f4")}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].shape == tensor.shape
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        (b"", b"", 10**9, ["cut short", "1000000000"]),
        (b"{not json", b"", None, ["header"]),
        ({"x": {"dtype": "F32"}}, b"", None, ["header", "shape"]),
        ({"x": 3}, b"", None, ["header"]),
        ([1], b"", None, ["header"]),
        (b"[" * 100_000, b"", None, ["header", "nested"]),
        (b"\xff", b"", None, ["header"]),
        ({"x": entry()["x"] | {"shape": [2.0]}}, bytes(8), None, ["header", "'x'"]),
        ({"x": entry()["x"] | {"shape": [-1, -2]}}, bytes(8), None, ["header", "'x'"]),
        ({"x": entry()["x"] | {"shape": "2"}}, bytes(8), None, ["header", "'x'"]),
        ({"x": entry()["x"] | {"dtype": ["F32"]}}, bytes(8), None, ["'x'", "BF16"]),
        ({"x": entry()["x"] | {"data_offsets": [0, 4, 8]}}, bytes(8), None, ["header", "'x'"]),
        ({"x": entry()["x"] | {"data_offsets": [-8, 0]}}, bytes(8), None, ["header", "'x'"]),
        ({"x": entry()["x"] | {"data_offsets": [2**63, 2**63 + 8]}}, bytes(8), None, ["cut short"]),
        (b'{"x": {"shape": [' + b"9" * 5000 + b"]}}", b"", None, ["header"]),
        (entry("F4"), bytes(8), None, ["'x'", "F4", "BF16"]),
        (entry(end=8), bytes(5), None, ["cut short", "'x'"]),
        (entry(end=12), bytes(12), None, ["'x'", "12 bytes", "needs 8"]),
    ],
)
def test_damage_is_named(tmp_path, header, data, length, words):
    path = write_raw(tmp_path / "model.safetensors", header, data, length=length)
    with pytest.raises(CheckpointError) as error:
        SafetensorsCheckpoint(tmp_path)
    assert all(word in str(error.value) for word in [str(path), *words])


def test_file_too_short_for_a_header(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="only 3 bytes"):
        SafetensorsFile(tmp_path / "a")


def test_shards_come_from_the_index(tmp_path):
    one, two = np.ones(2, np.float32), np.zeros(3, np.float32)
    save_file({"one": one}, tmp_path / "model-1.safetensors")
    save_file({"two": two}, tmp_path / "model-2.safetensors")
    save_file({"other": two}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"one": "model-1.safetensors", "two": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.tensors) == {"one", "two"}
    np.testing.assert_array_equal(checkpoint.read("two"), two)

    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of the 2 files .* 'model-2.safetensors'"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {},
        {"weight_map": 5},
        {"weight_map": ["model.safetensors"]},
        {"weight_map": {"x": 5}},
        {"weight_map": {"x": ""}},
        {"weight_map": {"x": "config.json"}},
        {"weight_map": {"x": "../other/model.safetensors"}},
        {"weight_map": {"x": "/model.safetensors"}},
    ],
)
def test_index_names_files_of_its_own_folder(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_map"):
        SafetensorsCheckpoint(tmp_path)


def test_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file"):
        SafetensorsCheckpoint(tmp_path)


def test_files_that_cannot_be_opened(tmp_path):
    for name in ("folder", "link"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder" / "model.safetensors").mkdir()
    (tmp_path / "link" / "a.safetensors").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "link"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            SafetensorsCheckpoint(tmp_path / name)
