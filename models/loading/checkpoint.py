"""From the tensors of a checkpoint to the parameters of a model.

Everything that can be wrong with a checkpoint is found from its headers before memory is taken.
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
    """Shape of a tensor as `ParamSpec` counts it, and the file it is in."""

    shape: tuple[int, ...]
    file: str


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
        CheckpointError: tensors are missing, unexpected or of the wrong shape.
    """
    check_tensors(specs, checkpoint)
    trees = (specs,) if sharding is None else (specs, sharding)
    with progress(param_bytes(specs, dtype), "Loading weights", "B", show=show_progress) as advance:

        def load(spec: ParamSpec, target: Any = None) -> jax.Array:
            tensors = [part.cut(checkpoint.read(part.name)) for part in spec.parts]
            param = _assemble(spec, tensors, dtype, target)
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
    """Compare the tensors a model needs with those a checkpoint has, by name and shape."""
    expected = {part.name: part.shape for spec in jax.tree.leaves(specs) for part in spec.parts}
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


def _is_harmless(name: str) -> bool:
    """A tied head is a copy of the embedding; it is expected, and checked, only when untied."""
    return name == "lm_head.weight" or _HARMLESS.search(name) is not None


def _listing(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{'tensors' if len(names) > 1 else 'tensor'} {shown}{more}"
