"""Flags, under the name that the server's start-up imports them by."""

from __future__ import annotations

from paged.runtime.flags import read_flags

__all__ = ["read_flags"]
