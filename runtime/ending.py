"""How long an engine takes to end, whatever its process or its device does."""

from __future__ import annotations

import threading
from collections.abc import Callable

LAST_STEP = 5.0
"""Seconds for the step that runs when an engine is told to end; after that it hangs."""

TIME_TO_CLOSE = 10.0
"""Seconds in which a process that does not hang gives its device's memory back."""

TIME_TO_EXIT = 5.0
"""Seconds from its closing the connection to its end."""

TIME_TO_BE_KILLED = 5.0
"""Seconds in which a process that is killed is gone; a driver may hold it up."""

TIME_TO_END = LAST_STEP + TIME_TO_CLOSE + TIME_TO_EXIT + TIME_TO_BE_KILLED
"""Seconds in which an engine is shut down at most."""

LONGEST_SAVING = 60.0
"""Seconds more where pages are written to disk."""


def await_end(
    thread: threading.Thread, is_stepping: Callable[[], bool], kill: Callable[[str], None]
) -> None:
    """Wait for an engine's thread that was told to end, unless this is it.

    Args:
        is_stepping: whether it has not come to closing the engine yet, which takes bounded time.
        kill: ends a process that the step waits for; the reason goes along. A step on a device in
            this process may go on for ever: then nobody waits for it.
    """
    if threading.current_thread() is thread:
        return
    thread.join(LAST_STEP)
    if is_stepping():
        kill(f"its last step takes more than {LAST_STEP:g} s")
        thread.join(LAST_STEP)
    if not is_stepping():
        thread.join()
