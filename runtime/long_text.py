"""What is known of text that may be long, and work on it that holds up nobody else's streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Twice what the longest tokens of known vocabularies stand for (they are runs of spaces).
LONGEST_TOKEN = 256
"""Characters that a token stands for at most."""

# Characters that take a few milliseconds to render or to tokenise.
_LONG_TEXT = 10_000


async def without_hurry[T](num_characters: int, work: Callable[[], T]) -> T:
    """The result of `work`, done in another thread if the text is long."""
    return work() if num_characters < _LONG_TEXT else await asyncio.to_thread(work)
