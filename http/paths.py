"""Paths of HTTP requests, and those that are for probes."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Scope

STATUS_PATH = "/status.json"
"""What the status page asks for every second."""
_PAGE, _PAGE_FILES = "/", "/static/"
_ADMIN = "/debug/"
PROBES = frozenset({"/health", "/ping", "/ready"})
"""Where supervisors and load balancers ask how the server is."""

OPEN_PATHS = PROBES | {"/version", "/metrics"}
"""What needs no key, and is not counted."""


def path_of(scope: Scope) -> str:
    """A request's path below the one at which a proxy offers this server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or _PAGE


def is_open(path: str, closed: Collection[str] = ()) -> bool:
    """Whether a path needs no key: the probes', and the page, which asks for one itself.

    Args:
        closed: paths that need one nonetheless.
    """
    opens = path in OPEN_PATHS or path == _PAGE or path.startswith(_PAGE_FILES)
    return opens and path not in closed


def is_for_admins(path: str) -> bool:
    """Whether a path needs the admin key, and no other will do."""
    return path.startswith(_ADMIN)
