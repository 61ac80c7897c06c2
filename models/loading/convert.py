"""Writing a model in the layout that `paged.models.loading.converted` reads.

Parameters are made and written one after the other, so that the host holds no more than two of
them, one as it stands on the device and one on its way to the disk. The folder gets its name last:
what has the name is whole.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from paged.errors import ConfigError
from paged.models.loading.checkpoint import check_tensors
from paged.models.loading.converted import (
    LAYOUT_FILE,
    LAYOUT_VERSION,
    PARAMS_FOLDER,
    UNFINISHED,
    param_names,
)
from paged.models.loading.hub import describing_files
from paged.models.loading.params import load_param
from paged.models.loading.progress import progress
from paged.models.loading.source import ModelSource
from paged.models.tokenizer import Tokenizer
from paged.models.weights import ParamSpec, param_bytes


def convert(source: ModelSource, out: Path, dtype: jnp.dtype, *, show_progress: bool = True) -> int:
    """Write a model as it is loaded, in `dtype`, to a folder that is not there yet.

    Returns:
        The bytes of the parameters.

    Raises:
        ConfigError: there is something by that name already, or too little room for it.
        CheckpointError: the model's files are damaged or of another model.
    """
    specs, checkpoint = source.open()
    check_tensors(specs, checkpoint)
    size = param_bytes(specs, dtype)
    with _new_folder(out, size) as folder:
        _write_tokenizer(source, folder)
        names = param_names(specs)
        with progress(size, "Writing weights", "B", show=show_progress) as advance:

            def make(spec: ParamSpec) -> np.ndarray:
                param = np.asarray(load_param(spec, checkpoint, dtype))
                advance(param.nbytes)
                return param

            leaves = [
                _Leaf(spec.shape, spec.dtype_among(dtype), partial(make, spec))
                for spec in jax.tree.leaves(specs)
            ]
            _save(dict(zip(names, leaves, strict=True)), folder / PARAMS_FOLDER)
        _write_json(folder / "config.json", _in_dtype(source.config_json, dtype))
        _write_json(folder / LAYOUT_FILE, {"version": LAYOUT_VERSION, "dtype": dtype.name})
    return size


@contextmanager
def _new_folder(out: Path, size: int) -> Iterator[Path]:
    """A folder under another name, which becomes `out` if all goes well and is removed if not."""
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists, and is not overwritten: delete it or name another folder")
    folder = out.with_name(out.name + UNFINISHED)
    _make(folder)
    try:
        free = shutil.disk_usage(folder).free
        if free < size:
            raise ConfigError(
                f"the parameters take {size / 1e9:.1f} GB, and {out.parent} has {free / 1e9:.1f} GB"
            )
        yield folder
        _flush(folder)
        folder.rename(out)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # what stays is refused by its name
        if isinstance(error, OSError):
            raise ConfigError(f"{folder} cannot be written: {error}") from error
        raise


def _make(folder: Path) -> None:
    """Make a folder, of which then nobody else believes that it is theirs to remove."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{folder} is of a conversion that is running, or was interrupted: delete it if "
            "nothing writes to it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error


def _flush(folder: Path) -> None:
    """Wait until the disk has everything, lest a power cut leave the name of what is not there."""
    for path in (folder, *folder.rglob("*")):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@dataclass(frozen=True)
class _Leaf:
    """A parameter that is made when its turn to be written comes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class _LeafHandler(ocp.type_handlers.NumpyHandler):
    """Makes a leaf while the one before is written, and stores it as the array that it is."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._writing: list[Any] = []

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[Any]:
        """See `TypeHandler.serialize`; nothing is left for Orbax to wait for."""
        for leaf, info in zip(values, infos, strict=True):
            array = leaf.make()
            await asyncio.to_thread(self.wait)
            self._writing = list(await super().serialize([array], [info]))
        await asyncio.to_thread(self.wait)
        return []

    def wait(self) -> None:
        """Until what is being written has been.

        Raises:
            OSError: it could not be.
        """
        try:
            for each in self._writing:
                each.result()
        except ValueError as error:  # what TensorStore makes of anything that a disk says
            raise OSError(str(error)) from error


def _save(leaves: dict[str, _Leaf], folder: Path) -> None:
    """Write an Orbax checkpoint; see `paged.models.loading.converted` for why it is a plain one."""
    handler = _LeafHandler()
    registry = ocp.type_handlers.create_type_handler_registry((_Leaf, handler))
    plain = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=False, use_compression=False, type_handler_registry=registry
    )
    try:
        with ocp.Checkpointer(plain) as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(leaves))
    finally:
        handler.wait()  # after an error, for nobody to write into a folder that is removed


def _write_tokenizer(source: ModelSource, folder: Path) -> None:
    """Everything of a model's folder that is no weight and no configuration of it."""
    if source.folder is None:
        _save_tokenizer(source.tokenizer(), folder)
        return
    for path in describing_files(source.folder):
        target = folder / path.relative_to(source.folder)
        if target.name == LAYOUT_FILE:  # of a model that was converted before
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """As `tokenizer_from_folder` reads it; what goes around a text is part of the backend."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    templates = [
        {"name": name, "template": template} for name, template in tokenizer.chat_templates.items()
    ]
    _write_json(
        folder / "tokenizer_config.json", {**tokenizer.special_tokens, "chat_template": templates}
    )


def _in_dtype(config_json: Any, dtype: np.dtype) -> dict[str, Any]:
    """config.json for weights of another dtype."""
    others = {name: value for name, value in config_json.items() if name != "torch_dtype"}
    return others | {"dtype": dtype.name}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
