"""Where log lines go and how they look: standard error, one line each, from every process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FORMAT = "%(levelname)s %(asctime)s %(about)s%(name)s: %(message)s"
_about: ContextVar[str] = ContextVar("about", default="")


def log_to_stderr(level: int | str, *names: str, about: str = "") -> None:
    """Log what these loggers say from `level` up, and others' warnings.

    Args:
        about: the model that all lines of this process are about, unless `lines_about` says more.
    """

    def say_about(record: logging.LogRecord) -> bool:
        name = current_model() or about
        record.about = f"[{name}] " if name else ""
        return True

    handler = logging.StreamHandler()
    handler.addFilter(say_about)
    logging.basicConfig(
        format=_FORMAT, datefmt="%m-%d %H:%M:%S", level=logging.WARNING, handlers=[handler]
    )
    for name in names:
        logging.getLogger(name).setLevel(level)


@contextmanager
def lines_about(name: str) -> Iterator[None]:
    """Begin log lines with the name of a model, where there are several; "" is for no name."""
    token = _about.set(name)
    try:
        yield
    finally:
        _about.reset(token)


def current_model() -> str:
    """The model that log lines are about here, "" if there is one alone."""
    return _about.get()
