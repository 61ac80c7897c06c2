"""Where log lines go and how they look: standard error, one line each."""

from __future__ import annotations

import logging

_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Log our own and the HTTP server's lines from `level` up, and others' warnings."""
    logging.basicConfig(format=_FORMAT, datefmt="%m-%d %H:%M:%S", level=logging.WARNING)
    for name in ("paged", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())


def leave_out(paths: str) -> None:
    """Log no HTTP request for these paths, given as /health,/metrics."""
    quiet = frozenset(path.strip() for path in paths.split(","))

    def wanted(record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, HTTP version, status.
        args = record.args
        path = str(args[2]) if isinstance(args, tuple) and len(args) > 2 else ""
        return path.partition("?")[0] not in quiet

    logging.getLogger("uvicorn.access").addFilter(wanted)
