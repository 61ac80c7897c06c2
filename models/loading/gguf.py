"""Reading GGUF files: metadata, the model configuration in it, and its tensors.

The layout is little-endian: a magic word, version, number of tensors and of metadata entries; the
entries; one record a tensor (name, dimensions innermost first, type, offset); and the data, aligned
to `general.alignment`. Quantised tensors are expanded to float32 as they are read.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from paged.errors import ConfigError
from paged.models.loading.checkpoint import CheckpointError, TensorInfo, map_file

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

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Whose files store q and k rows interleaved, for a rotation of neighbouring elements.
_INTERLEAVED = ("llama",)
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


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

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32 (a view for tensors stored as such)."""
        tensor = self.tensors[name]
        count = math.prod(tensor.byte_shape)
        raw = np.frombuffer(self._map, np.uint8, count=count, offset=tensor.start)
        try:
            return dequantize(raw.reshape(tensor.byte_shape), tensor.kind).reshape(tensor.shape)
        except NotImplementedError:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has type {tensor.kind.name}, which cannot be read"
            ) from None

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
            if not tensor.shape or tensor.shape[-1] % elements:
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


class GgufCheckpoint:
    """The weights of a GGUF file under their Hugging Face names and row order.

    Raises:
        CheckpointError: the file has a tensor that has no Hugging Face name.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._names = {
            _hf_name(name, file.path): name for name in file.tensors if name != _ROPE_DIVISORS
        }

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(self._file.tensors[stored].shape, str(self._file.path))
            for name, stored in self._names.items()
        }

    def read(self, name: str) -> np.ndarray:
        tensor = self._file.read(self._names[name])
        if self._file.metadata["general.architecture"] not in _INTERLEAVED:
            return tensor
        if ".q_proj." in name:
            return _half_split_rows(tensor, _architecture_key(self._file, "attention.head_count"))
        if ".k_proj." in name:
            return _half_split_rows(tensor, _num_kv_heads(self._file))
        return tensor


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The configuration in a file's metadata, as a config.json would state it."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} has architecture {name!r}; GGUF files of {', '.join(_ARCHITECTURES)} "
            "are supported"
        )
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight'")
    _refuse_partial_rotation(file, name)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[name]],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": _architecture_key(file, "embedding_length"),
        "intermediate_size": _architecture_key(file, "feed_forward_length"),
        "num_hidden_layers": _architecture_key(file, "block_count"),
        "num_attention_heads": _architecture_key(file, "attention.head_count"),
        "num_key_value_heads": _num_kv_heads(file),
        "head_dim": file.metadata.get(f"{name}.attention.key_length"),
        "max_position_embeddings": _architecture_key(file, "context_length"),
        "rope_theta": file.metadata.get(f"{name}.rope.freq_base"),
        "rms_norm_eps": _architecture_key(file, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": "bfloat16",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    return config | _rope_scaling(file, name)


def _refuse_partial_rotation(file: GgufFile, architecture: str) -> None:
    """Rows are put in order for whole heads; files that do not say how much is rotated mean all."""
    if f"{architecture}.rope.dimension_count" not in file.metadata:
        return
    if file.metadata.get(f"{architecture}.attention.key_length"):
        size: float = _architecture_count(file, "attention.key_length")
    else:
        heads = _architecture_count(file, "attention.head_count")
        size = _architecture_count(file, "embedding_length") / heads
    rotated = _architecture_count(file, "rope.dimension_count")
    if rotated != size:
        raise ConfigError(
            f"{file.path} rotates {rotated} of the {size:g} elements of a head; GGUF files that do "
            "not rotate all are not supported"
        )


def _rope_scaling(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Llama 3's scaling is stored as a divisor for each frequency; others by type and factor."""
    if _ROPE_DIVISORS in file.tensors:
        divisors = tuple(file.read(_ROPE_DIVISORS).tolist())
        return {"rope_scaling": {"rope_type": "factors", "divisors": divisors}}
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    scaling = {
        "rope_type": kind,
        "factor": file.metadata.get(f"{architecture}.rope.scaling.factor"),
        "original_max_position_embeddings": file.metadata.get(
            f"{architecture}.rope.scaling.original_context_length"
        ),
    }
    return {"rope_scaling": scaling}


def _architecture_key(file: GgufFile, key: str) -> Any:
    full_key = f"{file.metadata['general.architecture']}.{key}"
    if full_key not in file.metadata:
        raise CheckpointError(f"{file.path} has no metadata entry {full_key!r}")
    return file.metadata[full_key]


def _architecture_count(file: GgufFile, key: str) -> int:
    value = _architecture_key(file, key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{key!r} in {file.path} must be a whole number above 0")
    return value


def _num_kv_heads(file: GgufFile) -> int:
    architecture = file.metadata["general.architecture"]
    heads = file.metadata.get(f"{architecture}.attention.head_count_kv")
    return heads or _architecture_key(file, "attention.head_count")


def _hf_name(name: str, path: Path) -> str:
    """The Hugging Face name of a tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj…"""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    names = _LAYER_NAMES if match and match[1] else _GLOBAL_NAMES
    if not match or match[2] not in names:
        raise CheckpointError(f"{path} has a tensor {name!r} that the model has no place for")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{names[match[2]]}.{match[3]}"


def _half_split_rows(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k, which GGUF interleaves for its rotation, in half-split order again."""
    shape = tensor.shape
    return tensor.reshape(num_heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
