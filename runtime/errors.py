"""Errors that a caller can act on."""

from __future__ import annotations

from paged.errors import ConfigError

__all__ = ["ConfigError", "EngineDead", "EngineRestarting", "InvalidRequest", "Unsupported"]


class InvalidRequest(ValueError):
    """A request that can never run as it was asked.

    Attributes:
        param: the field that is wrong, named as the caller wrote it; None when it is the whole.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unsupported(InvalidRequest):
    """A known field or value that this version does not carry out."""


class EngineDead(RuntimeError):
    """The engine stopped after an error in a step; the message carries its cause."""


class EngineRestarting(EngineDead):
    """The engine stopped, and another one is being started in its place."""
