"""Telling how a long load gets on: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence

from tqdm import tqdm

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 5.0


def track(sizes: Sequence[int], label: str, *, show: bool) -> Iterator[int]:
    """Yield the index of each item of `sizes` (bytes), reporting the bytes of those done."""
    if show and sys.stderr.isatty():
        return _track_bar(sizes, label)
    return _track_lines(sizes, label) if show else iter(range(len(sizes)))


def _track_bar(sizes: Sequence[int], label: str) -> Iterator[int]:
    with tqdm(total=sum(sizes), desc=label, unit="B", unit_scale=True) as bar:
        for index, size in enumerate(sizes):
            yield index
            bar.update(size)


def _track_lines(sizes: Sequence[int], label: str) -> Iterator[int]:
    total, done = sum(sizes), 0
    start = reported = time.monotonic()
    for index, size in enumerate(sizes):
        yield index
        done += size
        now = time.monotonic()
        if now - reported >= _SECONDS_BETWEEN_LINES:
            reported = now
            logger.info("%s: %.1f of %.1f GB", label, done / 1e9, total / 1e9)
    logger.info("%s: %.2f GB in %.1f s", label, total / 1e9, time.monotonic() - start)
