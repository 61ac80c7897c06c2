"""The error of every floor for what the user configured."""

from __future__ import annotations


class ConfigError(ValueError):
    """A model or flags that this version or this machine cannot run; the message says what can."""
