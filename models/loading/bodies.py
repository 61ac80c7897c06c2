"""Checkpoints of a model's body: without its head, or with heads that vectors do not need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.embedder import Embedder, EmbedderParams
from paged.models.loading.checkpoint import Checkpoint, TensorInfo
from paged.models.loading.converted import ConvertedCheckpoint, stored_specs
from paged.models.loading.dummy import random_params
from paged.models.loading.gguf_checkpoint import GgufCheckpoint
from paged.models.loading.params import load_params
from paged.models.loading.safetensors import SafetensorsCheckpoint
from paged.models.loading.source import ModelSource

# Heads that models were trained with, and buffers that old exporters wrote. The last is a head that
# was converted.
_UNUSED = re.compile(
    r"(^|\.)(cls|lm_head|pooler|score|position_ids|token_type_ids)(\.|$)|^head\.kernel$"
)


class BodyCheckpoint:
    """A checkpoint whose names begin with `prefix`, be it that it has none, and no heads in it.

    Args:
        wanted: names, with their prefix, that are tensors of the model in any case.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, wanted: Iterable[str]) -> None:
        self._checkpoint = checkpoint
        has_prefix = any(name.startswith(prefix) for name in checkpoint.tensors)
        self._missing_prefix = "" if has_prefix else prefix
        self._wanted = frozenset(wanted)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        named = {self._missing_prefix + name: info for name, info in self._all.items()}
        return {
            name: info
            for name, info in named.items()
            if name in self._wanted or not _UNUSED.search(name)
        }

    def read(self, name: str) -> np.ndarray:
        return self._checkpoint.read(name.removeprefix(self._missing_prefix))

    @property
    def _all(self) -> Mapping[str, TensorInfo]:
        return self._checkpoint.tensors


def load_embedder(
    embedder: Embedder,
    source: ModelSource,
    dtype: jnp.dtype,
    *,
    seed: int = 0,
    progress: bool = True,
) -> EmbedderParams:
    """The parameters on the device.

    Args:
        dtype: to cast to.
        seed: of random weights; a checkpoint ignores it.
        progress: tell how it gets on.

    Raises:
        CheckpointError: the files are damaged or of another model.
    """
    specs = embedder.specs()
    if source.open_checkpoint is None:
        return random_params(specs, dtype, seed=seed)
    described, prefix, checkpoint = specs.body, embedder.prefix, source.open_checkpoint()
    if isinstance(checkpoint, ConvertedCheckpoint):
        described, prefix = stored_specs(described, checkpoint), ""
    if isinstance(checkpoint, GgufCheckpoint):
        checkpoint = checkpoint.as_described(described)
    wanted = [part.name for spec in jax.tree.leaves(described) for part in spec.parts]
    body = BodyCheckpoint(checkpoint, prefix, wanted)
    return EmbedderParams(
        load_params(described, body, dtype, show_progress=progress),
        tuple(
            _load_dense(spec, source.folder, module.folder, dtype)
            for spec, module in zip(specs.dense, embedder.pooling.dense, strict=True)
        ),
    )


def _load_dense(spec: Any, folder: Path | None, name: str, dtype: jnp.dtype) -> Any:
    assert folder is not None, "only folders list modules"
    return load_params(spec, SafetensorsCheckpoint(folder / name), dtype, show_progress=False)
