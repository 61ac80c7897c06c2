"""How far a long start has got, told to whoever waits for it. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Report(NamedTuple):
    """What has been done of a part of the start.

    Attributes:
        label: of the part, as "Loading weights".
        unit: what is counted, as "B" for bytes or " programs".
        done, total: so much of it.
    """

    label: str
    unit: str
    done: int
    total: int


Watcher = Callable[[Report], object]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def reports_to(watcher: Watcher) -> Iterator[None]:
    """Have a function called with the reports made here meanwhile."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def report(news: Report) -> None:
    """Tell it to the watcher, if there is one."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(news)
