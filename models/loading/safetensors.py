"""Reading safetensors files through a memory map, as views in their own dtype.

The format is 8 bytes of header length, that many bytes of JSON, and the raw tensors. The map gives
BF16 and F8 tensors, which numpy has no name of its own for, as ml_dtypes views without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from paged.models.json_files import NotAnObject, parse_object, read_object
from paged.models.loading.checkpoint import CheckpointError, TensorInfo, map_file

_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: dtype, shape and first byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


class SafetensorsFile:
    """The tensors of one file.

    Raises:
        CheckpointError: the file is cut short or its header does not describe its content.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        size = len(self._map)
        if size < _LENGTH_BYTES:
            raise CheckpointError(f"{path} is no safetensors file: it has only {size} bytes")
        header_bytes = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        data_start = _LENGTH_BYTES + header_bytes
        if data_start > size:
            raise CheckpointError(
                f"{path} is cut short or no safetensors file: its header should take "
                f"{header_bytes} bytes, the file has {size}"
            )
        try:
            header = parse_object(self._map[_LENGTH_BYTES:data_start])
        except NotAnObject as error:
            raise CheckpointError(f"the header of {path} cannot be read: {error}") from error
        header.pop("__metadata__", None)
        self.entries = {
            name: self._entry(name, fields, data_start, size) for name, fields in header.items()
        }

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor."""
        entry = self.entries[name]
        count = math.prod(entry.shape)
        flat = np.frombuffer(self._map, entry.dtype, count=count, offset=entry.start)
        return flat.reshape(entry.shape)

    def _entry(self, name: str, fields: Any, data_start: int, size: int) -> _Entry:
        try:
            kind, shape = str(fields["dtype"]), _counts(fields["shape"])
            begin, end = _counts(fields["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the header of {self.path} is wrong about tensor {name!r}: {error!r}"
            ) from error
        if kind not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has dtype {kind}; supported: {', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[kind]
        needed = math.prod(shape) * dtype.itemsize
        if end - begin != needed:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} takes {end - begin} bytes; "
                f"its shape {list(shape)} of {kind} needs {needed}"
            )
        if data_start + end > size:
            raise CheckpointError(
                f"{self.path} is cut short: tensor {name!r} ends at byte {data_start + end}, "
                f"the file has {size}; fetch it again"
            )
        return _Entry(dtype, shape, data_start + begin)


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(each) is int and each >= 0 for each in values):
        raise TypeError("not a list of whole numbers from 0 on")
    return tuple(values)


class SafetensorsCheckpoint:
    """The tensors of a Hugging Face folder: one file, or an index and its shards.

    Raises:
        CheckpointError: there are no files, a shard is missing, or one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        for path in _shards(folder):
            file = SafetensorsFile(path)
            self._files |= dict.fromkeys(file.entries, file)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(file.entries[name].shape, str(file.path), file.entries[name].dtype)
            for name, file in self._files.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self._files[name].read(name)


def _shards(folder: Path) -> list[Path]:
    """The weight files of a folder, from its index where it has one."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if not found:
            raise CheckpointError(
                f"{folder} has no *.safetensors file (other formats are not read); "
                "load format 'dummy' makes random weights"
            )
        return found
    names = sorted(set(_weight_map(index).values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(names)} files its index names, "
            f"first {missing[0]!r}"
        )
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor to file, as an index says; all files are in its own folder."""
    try:
        found = read_object(index).get("weight_map")
    except NotAnObject as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(map(_is_file_name, found.values())):
        raise CheckpointError(f"{index} has no 'weight_map' of tensors to names of files beside it")
    return found


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and name == Path(name).name
