"""Single values of a config.json, each checked for its kind: whoever wrote it makes mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged.errors import ConfigError

# No model has as many of anything, and arithmetic on the device ends here.
TOO_MANY, TOO_LARGE = 2**31, 1e30
_LONGEST_SHOWN = 60


def count(data: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of things; `default` stands for one that is absent or null."""
    value = default if data.get(key) is None else data[key]
    if value is None:
        raise ConfigError(f"the model configuration has no {key!r}")
    if type(value) is not int or not 0 < value < TOO_MANY:
        raise ConfigError(f"{key!r} must be a whole number above 0, found {shown(value)}")
    return value


def number(data: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0; `default` stands for one that is absent."""
    value = data.get(key, default)
    if type(value) not in (int, float) or not 0 < value < TOO_LARGE:
        raise ConfigError(f"{key!r} must be a number above 0, found {shown(value)}")
    return float(value)


def optional_number(data: Mapping[str, Any], key: str) -> float | None:
    """A number above 0, or None where it is absent or null."""
    return None if data.get(key) is None else number(data, key)


def flag(data: Mapping[str, Any], key: str) -> bool:
    """True or false; absent or null is false."""
    value = data.get(key, False)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{key!r} must be true or false, found {shown(value)}")
    return bool(value)


def expect(data: Mapping[str, Any], key: str, *allowed: Any) -> None:
    """Refuse a setting that a family has in config.json but does not run otherwise than `allowed`.

    Absent or null is as good as allowed.
    """
    value = data.get(key)
    if value is not None and value not in allowed:
        raise ConfigError(
            f"{key} {shown(value)} is not supported for this model; supported: "
            f"{', '.join(map(repr, allowed))}"
        )


def shown(value: Any) -> str:
    """A value for a message, however long it is."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
