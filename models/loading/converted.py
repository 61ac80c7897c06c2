"""Reading a model that `paged convert` wrote: its parameters as they stand on the device.

The folder looks like a Hugging Face one, with `paged.json` for the layout and, for weights, an
Orbax checkpoint in `params/`: an array for each parameter of the family's description, named by its
place there ("layers.0.qkv.kernel"), fused, transposed and in its dtype. Arrays are Zarr (version
2), not cut and not compressed: the one file of an array is its elements in C order, which is mapped
as it is, and of which each device reads its share. So the layout is for any number of devices, and
of any kind: which type multiplies a weight is settled after loading
(`paged.models.weights.for_device`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.json_files import NotAnObject, read_object
from paged.models.loading.checkpoint import CheckpointError, TensorInfo, map_file
from paged.models.weights import ParamSpec

LAYOUT_FILE = "paged.json"
# Raised when parameters are named, shaped or stored in another way than before.
LAYOUT_VERSION = 2
PARAMS_FOLDER = "params"
UNFINISHED = ".unfinished"
_ARRAY_FILE = ".zarray"
# Of a Zarr array whose only file holds its elements as they are.
_PLAIN = {"zarr_format": 2, "order": "C", "compressor": None, "filters": None}


def param_names(specs: Any) -> list[str]:
    """What converted checkpoints call the parameters of a description, leaf by leaf."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(specs)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


def stored_specs(specs: Any, checkpoint: ConvertedCheckpoint) -> Any:
    """The same parameters, described as a converted checkpoint holds them: each as it is.

    What is quantised may also be made of what the checkpoint holds in full precision.
    """
    described, structure = jax.tree.flatten(specs)
    named = zip(param_names(specs), described, strict=True)
    found = checkpoint.tensors
    return jax.tree.unflatten(
        structure,
        [
            ParamSpec.stored(spec, name) if name in found else spec.stored(name)
            for name, spec in named
        ],
    )


def is_converted(folder: Path) -> bool:
    """Whether `paged convert` wrote this folder, and came to its end."""
    return (folder / LAYOUT_FILE).exists()


def check_layout(folder: Path) -> None:
    """Refuse what a conversion left half-written, or wrote for another version of Paged.

    Raises:
        CheckpointError: with what to do about it.
    """
    if folder.name.endswith(UNFINISHED):
        raise CheckpointError(
            f"{folder} is of a conversion that is running, or was interrupted; convert the model "
            "again, and delete this folder if nothing writes to it"
        )
    if not is_converted(folder):
        return
    path = folder / LAYOUT_FILE
    try:
        version = read_object(path).get("version")
    except NotAnObject as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if version != LAYOUT_VERSION:
        raise CheckpointError(
            f"{folder} has layout version {json.dumps(version)}, and this Paged reads version "
            f"{LAYOUT_VERSION}: convert the model again"
        )


@dataclass(frozen=True)
class _Array:
    """One array, and the file that holds its elements."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ConvertedCheckpoint:
    """The parameters in a converted folder, under their places in the family's description.

    Raises:
        CheckpointError: an array is missing a file, is cut short or was not written by Paged.
    """

    def __init__(self, folder: Path) -> None:
        descriptions = sorted((folder / PARAMS_FOLDER).glob(f"*/{_ARRAY_FILE}"))
        if not descriptions:
            raise CheckpointError(
                f"{folder / PARAMS_FOLDER} holds no parameters: convert the model again"
            )
        self._arrays = {path.parent.name: _read_array(path) for path in descriptions}

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(array.shape, str(array.path), array.dtype)
            for name, array in self._arrays.items()
        }

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a parameter."""
        array = self._arrays[name]
        return np.frombuffer(map_file(array.path), array.dtype).reshape(array.shape)


def _read_array(description: Path) -> _Array:
    """The array that a file describes, after a look at the size of the file beside it."""
    try:
        fields = read_object(description)
        shape = tuple(int(size) for size in fields["shape"])
        array = _Array(
            description.parent / ".".join("0" * len(shape)), jnp.dtype(fields["dtype"]), shape
        )
    except (NotAnObject, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{description} does not describe an array: {error}; convert the model again"
        ) from error
    is_plain = _PLAIN.items() <= fields.items() and array.dtype.isnative
    if fields.get("chunks") != fields["shape"] or not is_plain:
        raise CheckpointError(
            f"{description} is of an array in pieces, compressed or of swapped bytes, as `paged "
            "convert` does not write them: convert the model again"
        )
    found = array.path.stat().st_size if array.path.exists() else 0
    if found != array.num_bytes:
        raise CheckpointError(
            f"{array.path} has {found} bytes, and its array needs {array.num_bytes}: "
            "convert the model again"
        )
    return array
