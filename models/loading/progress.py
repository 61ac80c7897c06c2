"""Telling how a long start gets on: a bar for who watches, log lines for who reads them later."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

from tqdm import tqdm

from paged.models.reports import Report, report

logger = logging.getLogger(__name__)

Unit = Literal["B", " programs"]  # as tqdm puts it behind a number

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(
    total: int, label: str, unit: Unit, *, show: bool
) -> Iterator[Callable[[int], object]]:
    """Report on work of `total` units; the context is called with the size of each piece done.

    Args:
        show: whether people are told; see `paged.models.reports` for programs that want to know.
    """
    done = 0
    with _shown(total, label, unit) if show else nullcontext() as tell:
        report(Report(label, unit, done, total))

        def advance(size: int) -> None:
            nonlocal done
            done += size
            report(Report(label, unit, done, total))
            if tell is not None:
                tell(size)

        yield advance


@contextmanager
def _shown(total: int, label: str, unit: Unit) -> Iterator[Callable[[int], object]]:
    if _is_watched():
        with tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B") as bar:
            yield bar.update
    else:
        yield _Lines(total, label, unit).advance


def _is_watched() -> bool:
    """A notebook draws bars too, but its standard error is no terminal."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class _Lines:
    """A log line now and then; whoever asked for the work tells of its end."""

    def __init__(self, total: int, label: str, unit: Unit) -> None:
        self._total, self._label, self._unit = total, label, unit
        self._done = 0
        self._reported = time.monotonic()

    def advance(self, size: int) -> None:
        self._done += size
        now = time.monotonic()
        if now - self._reported >= _SECONDS_BETWEEN_LINES:
            self._reported = now
            logger.info("%s: %s", self._label, self._amount())

    def _amount(self) -> str:
        if self._unit == "B":
            return f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB"
        return f"{self._done} of {self._total}"
