"""Keeping the process of a rank above 0 running: it joins again whenever rank 0 has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from time import sleep

from paged.runtime.child_process import ChildProcess
from paged.runtime.config import EngineConfig
from paged.runtime.errors import EngineDead
from paged.runtime.logs import current_format
from paged.runtime.wire import Channel, Failed, FromFollower, Joined, Start

logger = logging.getLogger(__name__)

_PROGRAM = ("-m", "paged.runtime.hosts.follower")
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0


def serve_headless(
    config: EngineConfig, tell: Callable[[], None], program: Sequence[str] = _PROGRAM
) -> None:
    """Be a rank of an engine, over and over, until this process is ended.

    Args:
        tell: called each time when the model is loaded and compiled.
        program: of the process that follows rank 0.

    Raises:
        ConfigError, CheckpointError, ...: what no other try would mend.
    """
    delay = _FIRST_DELAY
    while True:
        reason, was_ready = _follow_once(config, tell, program)
        delay = _FIRST_DELAY if was_ready else min(2 * delay, _LONGEST_DELAY)
        logger.warning("%s: joining again in %g s", reason, delay)
        sleep(delay)


def _follow_once(
    config: EngineConfig, tell: Callable[[], None], program: Sequence[str]
) -> tuple[str, bool]:
    """Follow rank 0 once: why that ended, and whether the model was loaded before."""
    process, was_ready = ChildProcess(program), False
    reason: str | None = None
    with closing(Channel(process.connection, FromFollower)) as channel:
        try:
            level = logging.getLogger("paged").getEffectiveLevel()
            channel.send(Start(config, level, log_format=current_format()))
            while True:
                for message in channel.receive(wait=True):
                    if isinstance(message, Joined):
                        was_ready = True
                        tell()
                    elif isinstance(message, Failed):
                        reason = _reason(message)
        except EOFError:
            return reason or process.how_it_ended(), was_ready
        finally:
            process.end(0)


def _reason(failed: Failed) -> str:
    """What the process says that it ended of. Raises what is wrong here and stays so."""
    error = failed.error()
    if not isinstance(error, EngineDead):
        raise error
    return str(error)
