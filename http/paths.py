"""Paths of HTTP requests, and those that are for probes."""

from __future__ import annotations

from starlette.types import Scope

PROBES = frozenset({"/health", "/ping", "/ready"})
"""Where supervisors and load balancers ask how the server is."""

OPEN_PATHS = PROBES | {"/version", "/metrics"}
"""What needs no key."""


def path_of(scope: Scope) -> str:
    """A request's path below the one at which a proxy offers this server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
