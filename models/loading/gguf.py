"""Reading GGUF files: their metadata and tensors, whatever model they are of.

The layout is little-endian: a magic word, version, number of tensors and of metadata entries; the
entries; one record a tensor (name, dimensions innermost first, type, offset); and the data, aligned
to `general.alignment`. Quantised tensors are expanded to float32 as they are read, unless their
bytes are asked for.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from paged.models.loading.checkpoint import CheckpointError, map_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Metadata value types by their number in the file.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class _Tensor:
    """A tensor's shape (outermost first), type and first byte in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int

    @property
    def byte_shape(self) -> tuple[int, ...]:
        elements, size = GGML_QUANT_SIZES[self.kind]
        return (*self.shape[:-1], self.shape[-1] // elements * size)


class GgufFile:
    """Metadata and raw tensors of one file.

    Attributes:
        metadata: every entry, arrays as lists.
        tensors: by their name in the file.

    Raises:
        CheckpointError: the file is no GGUF file, is cut short, or has an unknown tensor type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        if not self._map:
            raise CheckpointError(f"{path} is empty")
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is cut short or damaged: its header does not end within its "
                f"{len(self._map)} bytes"
            ) from error
        self._check_extent()

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """A tensor, or the part at `index` of its first axis, in float32.

        A view for tensors stored as such.
        """
        tensor = self.tensors[name]
        shape = tensor.shape if index is None else tensor.shape[1:]
        try:
            return dequantize(self.read_bytes(name, index), tensor.kind).reshape(shape)
        except NotImplementedError:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has type {tensor.kind.name}, which cannot be read"
            ) from None

    def read_bytes(self, name: str, index: int | None = None) -> np.ndarray:
        """As `read`, its rows as they lie in the file, uint8: a view."""
        tensor = self.tensors[name]
        count = math.prod(tensor.byte_shape)
        raw = np.frombuffer(self._map, np.uint8, count=count, offset=tensor.start)
        raw = raw.reshape(tensor.byte_shape)
        return raw if index is None else raw[index]

    def _parse(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        if self._map[:4] != _MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file: it starts with {self._map[:4]!r}")
        cursor = _Cursor(self._map, 4)
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path} has GGUF version {version}; supported: "
                f"{', '.join(map(str, _VERSIONS))}"
            )
        num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_entries)}
        records = [self._record(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(f"{self.path} aligns its tensors to {alignment!r} bytes")
        start = -(-cursor.position // alignment) * alignment
        tensors = {
            name: _Tensor(shape, kind, start + offset) for name, shape, kind, offset in records
        }
        return metadata, tensors

    def _record(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.string()
        dimensions = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        number, offset = cursor.scalar("I"), cursor.scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has the unknown GGML type {number}"
            ) from None
        return name, tuple(reversed(dimensions)), kind, offset

    def _check_extent(self) -> None:
        for name, tensor in self.tensors.items():
            elements, _ = GGML_QUANT_SIZES[tensor.kind]
            if not tensor.shape or 0 in tensor.shape or tensor.shape[-1] % elements:
                raise CheckpointError(
                    f"tensor {name!r} in {self.path} has shape {list(tensor.shape)}; "
                    f"{tensor.kind.name} needs rows in multiples of {elements}"
                )
            end = tensor.start + math.prod(tensor.byte_shape)
            if end > len(self._map):
                raise CheckpointError(
                    f"{self.path} is cut short: tensor {name!r} ends at byte {end}, "
                    f"the file has {len(self._map)}; fetch it again"
                )


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, buffer: mmap.mmap | bytes, position: int) -> None:
        self._buffer = buffer
        self.position = position

    def scalar(self, code: str) -> Any:
        return self._unpack(code)[0]

    def string(self) -> str:
        return self._unpack(f"{self.scalar('Q')}s")[0].decode("utf-8")

    def value(self, kind: int) -> Any:
        """A metadata value of a type given by its number."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(self._code(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        return list(self._unpack(f"{count}{self._code(kind)}"))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"the file has a metadata value of the unknown type {kind}")
        return _SCALARS[kind]

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{codes}", self._buffer, self.position)
        self.position += struct.calcsize(f"<{codes}")
        return values
