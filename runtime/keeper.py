"""Keeping an engine alive: what happens when its process dies, or says nothing for too long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from paged.runtime.errors import EngineDead, EngineRestarting

logger = logging.getLogger(__name__)

RESTART_WINDOW = 600.0
"""Seconds over which restarts are counted."""

_LOOK_EVERY = 0.2
# One look is not enough: after a pause of this process the news that have come are yet to be read.
_LOOKS = 2
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0
# The first steps of a process load programs onto the device: they may take so many times as long.
_FIRST_STEPS = 3
_ALLOWANCE = 5
# Probes are told after this share of the time that a step may take.
_STALLED = 0.25


@dataclass(frozen=True)
class Keeping:
    """How an engine is kept alive.

    Attributes:
        step_timeout: seconds without news of a step after which the process is ended.
        max_restarts: how many times in `RESTART_WINDOW` another one is started; 0 for never.
    """

    step_timeout: float
    max_restarts: int


class Kept(Protocol):
    """An engine in its thread.

    Attributes:
        dead_error: what it died of; None while it lives and after a shutdown.
    """

    dead_error: EngineDead | None

    @property
    def num_steps(self) -> int:
        """Steps that it has taken."""

    @property
    def silence(self) -> float:
        """Seconds since the last news of a step, while one is waited for; else 0."""

    def check_running(self) -> None:
        """Raises EngineDead if it was shut down or has died."""

    def kill(self, reason: str) -> None:
        """Have it die, though it hangs, if that can be done."""

    def shutdown(self) -> None:
        """End all requests and close it. Idempotent."""


class Keeper[T: Kept]:
    """An engine in its thread, and after its death another one.

    Args:
        first: the first.
        again: makes another. May take minutes.
        keeping: None to let the first one die.

    Attributes:
        thread: of the engine that runs, or of the one that has died.
        num_restarts: how many engines have followed the first.
    """

    def __init__(self, first: T, again: Callable[[], T], keeping: Keeping | None) -> None:
        self.thread = first
        self.num_restarts = 0
        self._again = again
        self._keeping = keeping
        self._starts: list[float] = []  # of the engines after the first, those that failed included
        self._gives_up = keeping is None or not keeping.max_restarts
        self._ending = threading.Event()
        if keeping is not None:
            run = partial(copy_context().run, self._watch)  # log lines are about the same model
            threading.Thread(target=run, name="paged-keeper", daemon=True).start()

    @property
    def is_restarting(self) -> bool:
        """Whether the engine has died and another one will be there."""
        return self.thread.dead_error is not None and not self._gives_up

    @property
    def errored(self) -> bool:
        """Whether the engine has died for good."""
        return self.thread.dead_error is not None and not self.is_restarting

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be served now, None if they can: what follows "The engine"."""
        if self.thread.dead_error is not None:
            restarting = "has stopped and is being restarted"
            return restarting if self.is_restarting else "has stopped; see the server's log"
        silence = self.thread.silence
        is_late = silence > _STALLED * self._limit()
        return f"has finished no step for {silence:.0f} s" if is_late else None

    def living(self) -> T:
        """The engine that runs. Raises EngineRestarting or EngineDead without one."""
        thread = self.thread
        if self.is_restarting:
            raise EngineRestarting(str(thread.dead_error))
        thread.check_running()
        return thread

    def shutdown(self) -> None:
        """End every request with "abort" and close the engine. Idempotent.

        One that is being started ends by itself as soon as it is there.
        """
        self._ending.set()
        self.thread.shutdown()

    def _limit(self) -> float:
        """Seconds that a step may take; without end if nobody watches."""
        if self._keeping is None:
            return float("inf")
        is_new = self.thread.num_steps < _FIRST_STEPS
        return self._keeping.step_timeout * (_ALLOWANCE if is_new else 1)

    def _watch(self) -> None:
        num_late = 0
        while not self._ending.wait(_LOOK_EVERY):
            if self.thread.dead_error is not None:
                if not self._restart():
                    return
                continue
            silence, limit = self.thread.silence, self._limit()
            num_late = num_late + 1 if silence > limit else 0
            if num_late == _LOOKS:  # once: what cannot be ended so is not ended by more of it
                reason = f"no step has finished for {silence:.0f} s; at most {limit:g} may"
                logger.error("The engine hangs: %s", reason)
                self.thread.kill(reason)

    def _restart(self) -> bool:
        """Start another engine, or try to. Returns False when that is no use."""
        assert self._keeping is not None
        now, most = time.monotonic(), self._keeping.max_restarts
        self._starts = [each for each in self._starts if now - each < RESTART_WINDOW]
        if len(self._starts) >= most:
            if most:
                logger.critical(
                    "The engine has been restarted %d times in %g s: giving up",
                    *(most, RESTART_WINDOW),
                )
            self._gives_up = True
            return False
        delay = min(_FIRST_DELAY * 2 ** len(self._starts), _LONGEST_DELAY)
        logger.error(
            "The engine is gone (%s): restarting it in %g s", self.thread.dead_error, delay
        )
        if self._ending.wait(delay):
            return False
        self.thread.shutdown()  # until its process is gone, the device's memory is taken
        self._starts.append(time.monotonic())
        try:
            another = self._again()
        except Exception as error:  # whatever it is, it may be gone at the next try
            logger.error("The engine could not be restarted: %s", error)
            return True
        self.thread, self.num_restarts = another, self.num_restarts + 1
        logger.info("The engine is back, after %.1f s", time.monotonic() - now)
        if self._ending.is_set():
            self.thread.shutdown()
        return True
