"""The flags --generation-config and --override-generation-config: what a request that sets no
sampling parameters is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged.models.json_files import read_config
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.sampling_params import SamplingParams, with_model_defaults

if TYPE_CHECKING:
    from paged.models.loading import ModelSource

_FILE = "generation_config.json"


def default_params(config: EngineConfig, source: ModelSource) -> SamplingParams:
    """Raises ConfigError for a value out of its range, or a file that is not there."""
    values = _values(config.generation_config, source.generation_config)
    return with_model_defaults({**values, **(config.override_generation_config or {})})


def _values(wanted: str, of_model: Mapping[str, Any]) -> Mapping[str, Any]:
    if wanted == "auto":
        return of_model
    if wanted in ("paged", "vllm"):
        return {}
    path = Path(wanted).expanduser()
    path = path / _FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"--generation-config must be 'auto', 'paged' or a file like {_FILE}, got {wanted!r}"
        )
    return read_config(path)
