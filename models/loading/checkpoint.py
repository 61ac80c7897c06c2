"""From the tensors of a checkpoint to the parameters of a model.

All that headers can tell of a checkpoint that is wrong is found before memory is taken.
Tensors then go to the device one parameter at a time and are joined, transposed and cast there, so
that the host holds no more than the parameter in flight.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.loading.progress import progress
from paged.models.weights import ParamSpec, param_bytes

# Buffers that old exporters wrote beside the weights and nothing reads.
_HARMLESS = re.compile(r"(^|\.)(rotary_(pos_)?emb\.inv_freq|masked_bias|attn\.bias)$")
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


def load_params(
    specs: Any,
    checkpoint: Checkpoint,
    dtype: jnp.dtype,
    *,
    show_progress: bool = True,
    sharding: Any = None,
) -> Any:
    """Load the described parameters.

    Args:
        specs: pytree of `ParamSpec`.
        dtype: of the parameters; tensors are cast as they arrive.
        show_progress: a bar on a terminal, or log lines elsewhere.
        sharding: None for the default device, or a pytree of shardings like `specs`.

    Raises:
        CheckpointError: tensors are missing, unexpected, of the wrong shape or dtype, or have NaN.
    """
    check_tensors(specs, checkpoint)
    trees = (specs,) if sharding is None else (specs, sharding)
    with progress(param_bytes(specs, dtype), "Loading weights", "B", show=show_progress) as advance:

        def load(spec: ParamSpec, target: Any = None) -> jax.Array:
            tensors = [part.cut(checkpoint.read(part.name)) for part in spec.parts]
            param = _assemble(spec, tensors, dtype, target)
            check_values(param, spec, checkpoint)
            advance(param.nbytes)
            return param

        return jax.tree.map(load, *trees)


def _assemble(
    spec: ParamSpec, tensors: list[np.ndarray], dtype: jnp.dtype, sharding: Any
) -> jax.Array:
    """Join one parameter on the device, waiting for it so that transfers do not pile up.

    Compiled once for all parameters of the same make: their names do not count.
    """
    anonymous = tuple(replace(part, name="") for part in spec.parts)
    make = _assembler(replace(spec, parts=anonymous), dtype, sharding)
    return make(tensors).block_until_ready()


@cache
def _assembler(
    spec: ParamSpec, dtype: jnp.dtype, sharding: Any
) -> Callable[[list[np.ndarray]], jax.Array]:
    return jax.jit(partial(spec.assemble, dtype=dtype), out_shardings=sharding)


def check_tensors(specs: Any, checkpoint: Checkpoint) -> None:
    """Compare the tensors a model needs with those a checkpoint has: names, shapes and dtypes."""
    parts = {part.name: part for spec in jax.tree.leaves(specs) for part in spec.parts}
    expected = {name: part.shape for name, part in parts.items()}
    found = checkpoint.tensors
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listing(missing)}")
    unexpected = [name for name in found if name not in expected and not _is_harmless(name)]
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has {_listing(unexpected)} that the model has no place for; "
            "is config.json of this checkpoint?"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"tensor {name!r} in {found[name].file} has shape {list(found[name].shape)}, "
                f"expected {list(shape)} from config.json"
            )
        if not parts[name].takes(found[name].dtype):
            raise CheckpointError(
                f"tensor {name!r} in {found[name].file} has dtype {found[name].dtype}, expected "
                f"{'uint8' if parts[name].is_bytes else 'a floating-point one'}; "
                "is it quantized in a way that config.json does not tell of?"
            )


def _is_harmless(name: str) -> bool:
    """A tied head is a copy of the embedding; it is expected, and checked, only when untied."""
    return name == "lm_head.weight" or _HARMLESS.search(name) is not None


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
        if part.is_bytes or np.abs(tensor.astype(np.float32)).max() > most:
            raise CheckpointError(
                f"{where} has values beyond {most:.3g}, where {param.dtype} ends; "
                "choose dtype bfloat16"
            )
