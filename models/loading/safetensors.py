"""Reading safetensors files through a memory map, as views in their own dtype.

The format is 8 bytes of header length, that many bytes of JSON, and the raw tensors. The map gives
BF16 and F8 tensors, which numpy has no name of its own for, as ml_dtypes views without a copy.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from paged.models.loading.checkpoint import CheckpointError, TensorInfo

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
        size = path.stat().st_size
        if size < _LENGTH_BYTES:
            raise CheckpointError(f"{path} is no safetensors file: it has only {size} bytes")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header_bytes = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        data_start = _LENGTH_BYTES + header_bytes
        if data_start > size:
            raise CheckpointError(
                f"{path} is cut short or no safetensors file: its header should take "
                f"{header_bytes} bytes, the file has {size}"
            )
        try:
            header = json.loads(self._map[_LENGTH_BYTES:data_start])
            header.pop("__metadata__", None)
            self.entries = {
                name: self._entry(name, fields, data_start, size) for name, fields in header.items()
            }
        except (AttributeError, KeyError, TypeError, UnicodeDecodeError, JSONDecodeError) as error:
            raise CheckpointError(f"the header of {path} cannot be read: {error!r}") from error

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor."""
        entry = self.entries[name]
        count = math.prod(entry.shape)
        flat = np.frombuffer(self._map, entry.dtype, count=count, offset=entry.start)
        return flat.reshape(entry.shape)

    def _entry(self, name: str, fields: dict[str, Any], data_start: int, size: int) -> _Entry:
        if fields["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has dtype {fields['dtype']}; "
                f"supported: {', '.join(_DTYPES)}"
            )
        entry = _Entry(_DTYPES[fields["dtype"]], tuple(fields["shape"]), data_start)
        begin, end = fields["data_offsets"]
        needed = math.prod(entry.shape) * entry.dtype.itemsize
        if end - begin != needed:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} takes {end - begin} bytes; "
                f"its shape {list(entry.shape)} of {fields['dtype']} needs {needed}"
            )
        if data_start + end > size:
            raise CheckpointError(
                f"{self.path} is cut short: tensor {name!r} ends at byte {data_start + end}, "
                f"the file has {size}; fetch it again"
            )
        return _Entry(entry.dtype, entry.shape, data_start + begin)


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
            name: TensorInfo(file.entries[name].shape, str(file.path))
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
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(names)} files its index names, "
            f"first {missing[0]!r}"
        )
    return [folder / name for name in names]
