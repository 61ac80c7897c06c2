"""Checkpoints of bitsandbytes, whose scales are expanded as they are read.

For a weight of 4 bits a file holds how it is quantised in JSON, as bytes of a tensor, and scales
("absmax"), which may be bytes themselves: indices of numbers in a table, each with a scale for 256
neighbours and an offset common to all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from paged.models.json_files import NotAnObject, parse_object
from paged.models.loading.checkpoint import Checkpoint, CheckpointError, TensorInfo
from paged.models.quantized.bitsandbytes import NF4_GROUP, NF4_SCALES

_STATE = "weight.quant_state.bitsandbytes__nf4"
_ABSMAX, _NESTED, _NESTED_CODES = "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map"
_HIDDEN = (_STATE, _ABSMAX, _NESTED, _NESTED_CODES, "weight.quant_map", ".weight_format")


class BitsandbytesCheckpoint:
    """The tensors of a checkpoint, with expanded scales in place of what they are made of."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `Checkpoint`."""
        found = self._checkpoint.tensors
        shown = {name: info for name, info in found.items() if not name.endswith(_HIDDEN)}
        for name, info in found.items():
            if name.endswith(_ABSMAX):
                scales = name.removesuffix(_ABSMAX) + NF4_SCALES
                shown[scales] = TensorInfo((math.prod(info.shape),), info.file)
        return shown

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint`."""
        if not name.endswith(NF4_SCALES):
            return self._checkpoint.read(name)
        module = name.removesuffix(NF4_SCALES)
        state, absmax = self._state(module), self._checkpoint.read(module + _ABSMAX)
        if absmax.dtype != np.uint8:
            return absmax.reshape(-1)
        codes = self._checkpoint.read(module + _NESTED_CODES)[absmax.reshape(-1)]
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        is_number = isinstance(offset, int | float) and not isinstance(offset, bool)
        if not isinstance(size, int) or not is_number:
            raise self._wrong(module, state)
        nested = np.repeat(self._checkpoint.read(module + _NESTED), size)[: codes.size]
        return codes * nested + np.float32(offset)

    def _state(self, module: str) -> dict[str, Any]:
        """How a weight is quantised.

        Raises:
            CheckpointError: in another way than is supported.
        """
        if module + _STATE not in self._checkpoint.tensors:
            raise CheckpointError(
                f"the checkpoint lacks tensor {module + _STATE!r}; of bitsandbytes' weights of 4 "
                "bits, NF4 is supported"
            )
        try:
            state = parse_object(self._checkpoint.read(module + _STATE).tobytes())
        except NotAnObject as error:
            raise CheckpointError(f"tensor {module + _STATE!r} cannot be read: {error}") from error
        if state.get("blocksize") != NF4_GROUP:
            raise self._wrong(module, state)
        return state

    def _wrong(self, module: str, state: dict[str, Any]) -> CheckpointError:
        return CheckpointError(
            f"tensor {module + _STATE!r} says {state}; supported: a blocksize of {NF4_GROUP}, and "
            "of scales that are quantized too a nested_blocksize and a nested_offset"
        )
