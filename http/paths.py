"""Paths of HTTP requests, and those that are for probes."""

from __future__ import annotations

from starlette.types import Scope

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""What needs no key."""
_ADMIN = "/debug/"


def is_for_admins(path: str) -> bool:
    """Whether a path needs the key of an admin."""
    return path.startswith(_ADMIN)


def path_of(scope: Scope) -> str:
    """A request's path below the one at which a proxy offers this server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
