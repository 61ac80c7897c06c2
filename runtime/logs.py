"""Where log lines go and how they look: standard error, one line each, from every process."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

LogFormat = Literal["text", "json"]
_FORMAT = "%(levelname)s %(asctime)s %(about)s%(name)s: %(message)s"
_about: ContextVar[str] = ContextVar("about", default="")


class JsonFormatter(logging.Formatter):
    """A line as a JSON object: what every line has, and what it gave as `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        whole, milliseconds = divmod(int(record.created * 1000), 1000)
        found: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{milliseconds:03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if model := getattr(record, "model", ""):
            found["model"] = model
        if record.exc_info:
            found["trace"] = self.formatException(record.exc_info)
        return json.dumps(found | getattr(record, "fields", {}), default=str)


def log_to_stderr(
    level: int | str, *names: str, about: str = "", log_format: LogFormat = "text"
) -> None:
    """Log what these loggers say from `level` up, and others' warnings.

    Args:
        about: the model that all lines of this process are about, unless `lines_about` says more.
    """

    def say_about(record: logging.LogRecord) -> bool:
        name = current_model() or about
        record.model, record.about = name, f"[{name}] " if name else ""
        return True

    handler = logging.StreamHandler()
    handler.addFilter(say_about)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    logging.basicConfig(
        format=_FORMAT, datefmt="%m-%d %H:%M:%S", level=logging.WARNING, handlers=[handler]
    )
    for name in names:
        logging.getLogger(name).setLevel(level)


def current_format() -> LogFormat:
    """How the lines of this process look."""
    handlers = logging.getLogger().handlers
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)
    return "json" if is_json else "text"


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
