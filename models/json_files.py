"""JSON that came with a model: written by strangers, perhaps damaged, never taken on trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged.errors import ConfigError


class NotAnObject(ValueError):
    """Text that is no JSON object."""


def parse_value(text: bytes) -> Any:
    """The value that `text` holds.

    Raises:
        NotAnObject: it is no JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise NotAnObject("it is nested too deeply") from None
    except ValueError as error:
        raise NotAnObject(f"it is not JSON: {error}") from error


def parse_object(text: bytes) -> dict[str, Any]:
    """The object that `text` holds.

    Raises:
        NotAnObject: it is no JSON, or another value.
    """
    value = parse_value(text)
    if not isinstance(value, dict):
        raise NotAnObject(f"it must hold a JSON object, found a {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        NotAnObject: see `parse_object`, or the file cannot be read.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise NotAnObject(error.strerror or str(error)) from error
    except ValueError as error:  # a name that no file can have
        raise NotAnObject(str(error)) from error
    return parse_object(text)


def read_config(path: Path) -> dict[str, Any]:
    """The object in a file that says what a model is.

    Raises:
        ConfigError: see `read_object`; it names the file.
    """
    try:
        return read_object(path)
    except NotAnObject as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
