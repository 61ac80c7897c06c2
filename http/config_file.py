"""`--config FILE`: flags from a YAML file, and for `paged serve` the models that it lists."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paged.http.options import ServeOptions
from paged.runtime.errors import ConfigError

CONFIG_FLAG = "--config"
MODELS = "models"
"""The entry of a file that lists models, each with flags of its own."""

# What is said of each model where there are several.
_OF_ONE_MODEL = (
    *("--model", "--served-model-name"),
    *("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-memory"),
)


def read_config(args: Sequence[str]) -> dict[str, Any]:
    """What the file behind `--config` says; nothing if the flag is not there.

    Raises:
        ConfigError: it cannot be read, or is no list of flags and values.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(CONFIG_FLAG)
    try:
        path = finder.parse_known_args(args)[0].config
    except argparse.ArgumentError:  # no file after the flag, which the real parser will say
        return {}
    return {} if path is None else _read_yaml(Path(path))


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold one 'flag: value' per line")
    return values


def flags_of(values: dict[str, Any]) -> list[str]:
    """The same on a command line."""
    flags: list[str] = []
    for name, value in values.items():
        flag = f"--{str(name).replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif isinstance(value, dict):
            flags.append(f"{flag}={json.dumps(value)}")
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags


def check_models(models: Any) -> list[dict[str, Any]]:
    """What a file lists under `models`. Raises ConfigError unless it is one set of flags each."""
    if not (isinstance(models, list) and models and all(isinstance(each, dict) for each in models)):
        raise ConfigError(
            f"--config: {MODELS} must list the models, each with its flags, as in\n"
            f"{MODELS}:\n  - model: NAME\n    gpu-memory-utilization: 0.5"
        )
    of_server = {each.name for each in fields(ServeOptions)}
    for number, entry in enumerate(models):
        for name in entry:
            if str(name).replace("-", "_").removeprefix("no_") in of_server:
                raise ConfigError(
                    f"--config: {name} is of the whole server, not of {MODELS}[{number}]: write it "
                    f"beside {MODELS}"
                )
    return models


def check_shared(given: Sequence[str], num_models: int) -> None:
    """Refuse beside a list of models what each has to say for itself.

    Args:
        given: the flags, of file and command line.
        num_models: in the list.
    """
    for flag in _OF_ONE_MODEL:
        if any(arg.partition("=")[0] == flag for arg in given):
            raise ConfigError(
                f"{flag} is of one model, and the --config file lists {num_models} under {MODELS}: "
                "write it there"
            )
