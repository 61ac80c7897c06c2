"""Where log lines go and how they look: standard error, one line each, from every process."""

from __future__ import annotations

import logging

_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def log_to_stderr(level: int | str, *names: str) -> None:
    """Log what these loggers say from `level` up, and others' warnings."""
    logging.basicConfig(format=_FORMAT, datefmt="%m-%d %H:%M:%S", level=logging.WARNING)
    for name in names:
        logging.getLogger(name).setLevel(level)
