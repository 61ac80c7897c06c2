"""Whole numbers as callers in Python give them."""

from __future__ import annotations

from numbers import Integral

from paged.runtime.errors import InvalidRequest


def check_whole(name: str, value: object) -> None:
    """Raise InvalidRequest if a value is neither None nor a whole number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise InvalidRequest(f"{name} must be a whole number, got {value!r:.60}", name)
