"""What the command line logs, and what it leaves out."""

from __future__ import annotations

import logging

from paged.runtime.logs import log_to_stderr


def configure_logging(level: str) -> None:
    """Log our own and the HTTP server's lines from `level` up, and others' warnings."""
    log_to_stderr(level.upper(), "paged", "uvicorn")
    # uvicorn tells of start and stop, which we do too, under a name that looks like trouble.
    logging.getLogger("uvicorn.error").addFilter(_is_no_chatter)


def _is_no_chatter(record: logging.LogRecord) -> bool:
    return record.levelno != logging.INFO


def leave_out(paths: str) -> None:
    """Log no HTTP request for these paths, given as /health,/metrics."""
    quiet = frozenset(path.strip() for path in paths.split(","))

    def wanted(record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, HTTP version, status.
        args = record.args
        path = str(args[2]) if isinstance(args, tuple) and len(args) > 2 else ""
        return path.partition("?")[0] not in quiet

    logging.getLogger("uvicorn.access").addFilter(wanted)
