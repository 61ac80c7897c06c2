"""`--config FILE`: flags from a YAML file, and for `paged serve` the models that it lists."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paged.http.arguments import with_dashes
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
        text = path.read_text(encoding="utf-8")
        _check_names(path, yaml.compose(text, Loader=yaml.SafeLoader))
        values = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ConfigError(f"--config {path}: is nested too deeply") from None
    if values is None:  # nothing but comments
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold one 'flag: value' per line")
    return values


def _check_names(path: Path, root: Any) -> None:
    """Refuse a name that stands twice beside each other, of which YAML would take the last.

    Args:
        root: of the nodes that YAML makes of the file; None if it is empty.
    """
    waiting, seen = [root], {id(None)}
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.id == "mapping":
            _check_mapping(path, [key for key, _ in node.value if key.id == "scalar"])
            waiting += [value for _, value in node.value]
        elif node.id == "sequence":
            waiting += node.value


def _check_mapping(path: Path, keys: Sequence[Any]) -> None:
    names = [key.value for key in keys]
    for at, key in enumerate(keys):
        if key.value in names[:at]:
            line = key.start_mark.line + 1
            raise ConfigError(f"--config {path}: {key.value} is there twice, again in line {line}")


def flags_of(values: dict[str, Any]) -> list[str]:
    """The same on a command line. Raises ConfigError for what cannot be written there."""
    flags: list[str] = []
    for name, value in values.items():
        flag = with_dashes(f"--{name}")
        if "." in flag:  # a key of a flag's JSON
            flags.append(f"{flag}={_as_json(name, value)}")
        elif isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif isinstance(value, dict):
            flags.append(f"{flag}={_as_json(name, value)}")
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags


def _as_json(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:  # as dates, and what holds itself
        raise ConfigError(f"--config: {name} must hold what JSON can say: {error}") from None


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
