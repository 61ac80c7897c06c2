"""The flags --quantization and --quantization-exclude."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paged.runtime.config import QUANTIZATION_EXCLUDE

if TYPE_CHECKING:
    from paged.models.loading import ModelSource

logger = logging.getLogger(__name__)
_INSTANCES = 5


def quantized_source(source: ModelSource, method: str, exclude: Sequence[str]) -> ModelSource:
    """What --quantization and --quantization-exclude make of a model.

    Raises:
        ConfigError: it is quantised already, or no GGUF file where that is asked for.
    """
    # Here, so that front, processor and their tests need no JAX.
    from paged.models.quantized import unmatched

    if tuple(exclude) == QUANTIZATION_EXCLUDE:  # who made a GGUF file chose already what to leave
        return source.quantized(method, () if method == "gguf" else exclude)
    modules = source.modules()
    for pattern in unmatched(exclude, modules):
        logger.warning(
            "--quantization-exclude %r names no weight of %s, which has, for instance, %s",
            *(pattern, source.name, ", ".join(_instances(modules))),
        )
    return source.quantized(method, exclude)


def _instances(modules: Iterable[str]) -> list[str]:
    """A few names, each with another ending."""
    return list({name.rpartition(".")[2]: name for name in modules}.values())[:_INSTANCES]
