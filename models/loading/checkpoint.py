"""What a checkpoint is: named tensors, and all that can be wrong with them."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.weights import ParamSpec, Part

# Buffers that old exporters wrote beside the weights and nothing reads, and what a quantized weight
# has that is not needed: zeros in the middle, groups in order, its shape, scales of activations
# (each token has its own here) and of the KV cache.
_HARMLESS = re.compile(
    r"(^|\.)(rotary_(pos_)?emb\.inv_freq|masked_bias|attn\.bias|qzeros|g_idx|weight_g_idx|"
    r"weight_shape|weight_zero_point|input_scale|input_zero_point|[kv]_scale|[kv]_zero_point)$"
)
_LISTED = 5


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete or not of the model it claims to be."""


class ModelNotFoundError(FileNotFoundError):
    """There is no model by that name, here or on the hub."""


class TensorInfo(NamedTuple):
    """Shape of a tensor as `ParamSpec` counts it, the file it is in, and what `read` gives."""

    shape: tuple[int, ...]
    file: str
    dtype: np.dtype = np.dtype(np.float32)


class Checkpoint(Protocol):
    """Named tensors, under the names Hugging Face checkpoints use."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, known from the headers alone."""

    def read(self, name: str) -> np.ndarray:
        """One tensor; a view of the file where the format allows it."""


def map_file(path: Path) -> mmap.mmap | bytes:
    """A file's bytes, read as they are needed.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:  # which cannot be mapped
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def release(tensor: np.ndarray) -> None:
    """Take a view of a mapped file out of this process's memory; reading it again brings it back.

    Without this, a process seems to hold every file that it read to the end of its days.
    """
    owner: Any = tensor
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, mmap.mmap) or not tensor.nbytes:
        return
    first = tensor.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    page = first - first % mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, page, first + tensor.nbytes - page)


def check_tensors(specs: Any, checkpoint: Checkpoint) -> None:
    """Compare the tensors a model needs with those a checkpoint has: names, shapes and dtypes."""
    expected = {part.name: part for spec in jax.tree.leaves(specs) for part in spec.parts}
    found = checkpoint.tensors
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listing(missing)}")
    unexpected = [name for name in found if name not in expected and not _is_harmless(name)]
    unexpected = [name for name in unexpected if not name.startswith(_further_layers(found))]
    unexpected = [name for name in unexpected if not _is_empty_bias(name, checkpoint)]
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has {_listing(unexpected)} that the model has no place for; "
            "is config.json of this checkpoint?"
        )
    for part in expected.values():
        _check_tensor(part, found[part.name])


def _check_tensor(part: Part, found: TensorInfo) -> None:
    if not part.fits(found.shape):
        raise CheckpointError(
            f"tensor {part.name!r} in {found.file} has shape {list(found.shape)}, "
            f"expected {list(part.shape)} from config.json"
        )
    if not part.takes(found.dtype):
        raise CheckpointError(
            f"tensor {part.name!r} in {found.file} has dtype {found.dtype}, expected "
            f"{part.dtype or 'a floating-point one of 16 bits or more'}; "
            "is it quantized in a way that config.json does not tell of?"
        )


def _is_harmless(name: str) -> bool:
    """A tied head is a copy of the embedding; it is expected, and checked, only when untied."""
    return name == "lm_head.weight" or _HARMLESS.search(name) is not None


def _is_empty_bias(name: str, checkpoint: Checkpoint) -> bool:
    """GPTQ's tools write a bias of zeros for projections that have none."""
    module, _, last = name.rpartition(".")
    written = last == "bias" and f"{module}.qweight" in checkpoint.tensors
    return written and not checkpoint.read(name).any()


def _further_layers(names: Iterable[str]) -> tuple[str, ...]:
    """How names begin in layers that guess further tokens (DeepSeek-V3), which nothing runs."""
    mark = "eh_proj.weight"
    return tuple(name.removesuffix(mark) for name in names if name.endswith(f".{mark}"))


def _listing(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{'tensors' if len(names) > 1 else 'tensor'} {shown}{more}"


@jax.jit
def _all_finite(param: jax.Array) -> jax.Array:
    return jnp.isfinite(param).all()


def check_values(param: jax.Array, spec: ParamSpec, checkpoint: Checkpoint) -> None:
    """Refuse a loaded parameter with NaN or infinity in it: it would make NaN of every answer.

    Raises:
        CheckpointError: it has; the tensor that they came from is named.
    """
    if _all_finite(param):
        return
    most = float(jnp.finfo(param.dtype).max)
    for part in spec.parts:
        tensor = part.cut(checkpoint.read(part.name))
        where = f"tensor {part.name!r} in {checkpoint.tensors[part.name].file}"
        wrong = tensor.size - np.count_nonzero(np.isfinite(tensor))
        if wrong:
            raise CheckpointError(
                f"{where} has {wrong} values of {tensor.size} that are NaN or infinite; "
                "fetch it again, or ask whoever made it"
            )
        if part.dtype == np.uint8:
            raise CheckpointError(
                f"{where} has scales that are NaN or infinite; fetch it again, or ask whoever made "
                "it"
            )
        if part.dtype is not None or np.abs(tensor.astype(np.float32)).max() > most:
            raise CheckpointError(
                f"{where} has values beyond {most:.3g}, where {param.dtype} ends; "
                "choose dtype bfloat16"
            )
