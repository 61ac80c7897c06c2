"""Ctrl-C without leaving things half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back; calling what this yields lets it through as KeyboardInterrupt.

    The end of the context lets it through too. A second Ctrl-C does not wait. Where something else
    handles SIGINT, nothing is changed.
    """
    default = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not default:
        yield lambda: None
        return
    pressed = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            default(number, frame)
        pressed = True

    def let_through() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, default)
    let_through()
