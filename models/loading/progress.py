"""Telling how a long load gets on: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(total: int, label: str, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Report on a load of `total` bytes; the context is called with the bytes of each piece."""
    if not show:
        yield lambda _: None
    elif sys.stderr.isatty():
        with tqdm(total=total, desc=label, unit="B", unit_scale=True) as bar:
            yield bar.update
    else:
        lines = _Lines(total, label)
        yield lines.advance
        lines.finish()


class _Lines:
    """A log line now and then, and one at the end."""

    def __init__(self, total: int, label: str) -> None:
        self._total, self._label, self._done = total, label, 0
        self._start = self._reported = time.monotonic()

    def advance(self, size: int) -> None:
        self._done += size
        now = time.monotonic()
        if now - self._reported >= _SECONDS_BETWEEN_LINES:
            self._reported = now
            logger.info("%s: %.1f of %.1f GB", self._label, self._done / 1e9, self._total / 1e9)

    def finish(self) -> None:
        seconds = time.monotonic() - self._start
        logger.info("%s: %.2f GB in %.1f s", self._label, self._done / 1e9, seconds)
