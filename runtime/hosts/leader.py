"""What rank 0 does beside the work of an engine: gather the others, and tell them of each call."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from paged.models.loading import ModelSource
from paged.runtime.child_process import PEER_LOST
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError, EngineDead
from paged.runtime.greeting import NotAdmitted, in_one_line
from paged.runtime.hosts.cluster import begin, end
from paged.runtime.hosts.handshake import admit, facts_of
from paged.runtime.hosts.messages import (
    Begin,
    Call,
    End,
    Failing,
    Following,
    Packed,
    ToLeader,
)
from paged.runtime.line import Line
from paged.runtime.lowering import Key
from paged.runtime.programs import call_keys
from paged.runtime.step_device import Device, HostArray, Result

logger = logging.getLogger(__name__)

TIME_TO_JOIN = 600.0
"""Seconds in which all others must have joined."""

# Seconds between two lines about who is waited for.
_TELL_EVERY = 30.0
# From the loss of another process to the end of this one: time for a step to fail, and to say so.
_LAST_WORDS = 2.0


@dataclass(frozen=True)
class _Follower:
    """A process that has joined.

    Attributes:
        name: for people: its rank and its address.
    """

    name: str
    line: Line


class Followers:
    """The other processes of an engine. If one is lost, this process ends.

    Args:
        joined: by rank.
    """

    def __init__(self, joined: dict[int, _Follower]) -> None:
        self._joined = joined
        self._lost: str | None = None
        self._ready: set[int] = set()
        self._changed = threading.Condition()
        self._ended = False

    def watch(self) -> None:
        """Begin to hear from them."""
        for rank in self._joined:
            threading.Thread(target=self._hear, args=(rank,), daemon=True).start()

    def call(self, program: int, inputs: tuple[HostArray, ...]) -> None:
        """Have all of them call a program. Raises OSError if one is gone."""
        self._tell(Call(program, [Packed.of(each) for each in inputs]))

    def begin(self, coordinator: str) -> None:
        """Have them load the model. Raises OSError if one is gone."""
        self._tell(Begin(coordinator))

    def await_ready(self) -> None:
        """Wait until all have loaded and compiled. Raises EngineDead if one cannot."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._ready) == len(self._joined))
            if self._lost is not None:
                raise EngineDead(self._lost)

    def loss(self, seconds: float) -> str | None:
        """Who is gone, if that is found within so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, seconds)
            return self._lost

    def close(self) -> None:
        """Tell all of them that it is over. Idempotent."""
        self._ended = True
        with suppress(OSError):
            self._tell(End())
        for follower in self._joined.values():
            follower.line.close()

    def _tell(self, message: Call | Begin | End) -> None:
        for follower in self._joined.values():
            follower.line.send(message)

    def _hear(self, rank: int) -> None:
        """A thread for each of them: until it is ready, and then until it is gone."""
        follower, reason = self._joined[rank], "is gone"
        with suppress(EOFError, ValueError):
            while True:
                message = follower.line.receive()
                if isinstance(message, Failing):
                    reason = f"cannot go on: {in_one_line(message.reason)}"
                    break
                if isinstance(message, Following):
                    with self._changed:
                        self._ready.add(rank)
                        self._changed.notify_all()
        if not self._ended:
            self._lose(f"{follower.name} {reason}")

    def _lose(self, what: str) -> None:
        """End this process, which may wait for a device that waits for the lost one."""
        with self._changed:
            self._lost = self._lost or what
            self._changed.notify_all()
        logger.error("%s: the engine ends", what)
        time.sleep(_LAST_WORDS)
        if not self._ended:
            os._exit(PEER_LOST)


class LeadingDevice:
    """A `Device` of which every call is made by other processes, too.

    Args:
        device: what this process does.
        followers: the others; they are waited for, and ended with it.
    """

    def __init__(self, device: Device, followers: Followers) -> None:
        self.shapes, self.params = device.shapes, device.params
        self.programs, self.cache = device.programs, device.cache
        self._device, self._followers = device, followers
        self._numbers = {key: number for number, key in enumerate(call_keys(device.shapes))}
        followers.await_ready()

    def call(self, key: Key, *inputs: HostArray) -> Result | None:
        """See `Device`."""
        self._followers.call(self._numbers[key], inputs)
        return self._device.call(key, *inputs)

    def explain(self, error: Exception) -> str:
        """The loss of a process is often heard of first by those that compute with it."""
        return self._followers.loss(_LAST_WORDS / 2) or self._device.explain(error)

    def wait(self) -> None:
        """See `Device`."""
        self._device.wait()

    def close(self) -> None:
        """See `Device`."""
        self._device.close()
        self._followers.close()
        end()


def gather(config: EngineConfig, source: ModelSource) -> Followers:
    """Wait for the processes of all other ranks, and make one machine of their devices.

    Raises:
        ConfigError: the address cannot be listened on.
        EngineDead: they are not all there in `TIME_TO_JOIN`.
    """
    try:
        listener = socket.create_server((config.master_addr, config.master_port))
    except OSError as error:
        raise ConfigError(
            f"--master-addr {config.master_addr} --master-port {config.master_port} cannot be "
            f"listened on here ({error.strerror or error}): give an address of rank 0 that the "
            "other hosts reach, and a free port"
        ) from error
    with listener:
        followers = Followers(_joined(listener, config, facts_of(config, source)))
    followers.watch()
    coordinator = f"{config.master_addr}:{_free_port(config.master_addr)}"
    followers.begin(coordinator)
    begin(coordinator, config.nnodes, 0)
    logger.info("All %d processes of the engine are there", config.nnodes)
    return followers


def _joined(
    listener: socket.socket, config: EngineConfig, facts: dict[str, str]
) -> dict[int, _Follower]:
    """All other ranks, when they have come. Who leaves meanwhile is waited for again."""
    joined: dict[int, _Follower] = {}
    end, told = time.monotonic() + TIME_TO_JOIN, 0.0
    while missing := sorted(set(range(1, config.nnodes)) - set(joined)):
        now = time.monotonic()
        ranks = ", ".join(map(str, missing))
        if now > end:
            raise EngineDead(f"rank {ranks} of {config.nnodes} did not join in {TIME_TO_JOIN:g} s")
        if now - told > _TELL_EVERY:
            told = now
            logger.info("Waiting at port %d for rank %s", config.master_port, ranks)
        poll = select.poll()
        for descriptor in (listener.fileno(), *(f.line.fileno() for f in joined.values())):
            poll.register(descriptor, select.POLLIN)
        heard = {descriptor for descriptor, _ in poll.poll(1000)}
        for rank in [r for r, each in joined.items() if each.line.fileno() in heard]:
            joined.pop(rank).line.close()  # nothing is to be said yet: it has left
        if listener.fileno() in heard:
            _take(listener, config, facts, joined)
    return joined


def _take(
    listener: socket.socket,
    config: EngineConfig,
    facts: dict[str, str],
    joined: dict[int, _Follower],
) -> None:
    """Let in whoever has connected, in place of one of its rank, if it is to be let in."""
    connection, (host, *_) = listener.accept()
    line = Line(connection, ToLeader)
    try:
        rank = admit(line, facts)
        if not 0 < rank < config.nnodes:
            raise NotAdmitted(f"there is no rank {rank} beside rank 0 of {config.nnodes}")
    except (NotAdmitted, EOFError, OSError, ValueError) as error:
        logger.warning("%s is not admitted: %s", host, in_one_line(error))
        line.close()
        return
    if rank in joined:
        joined.pop(rank).line.close()
    joined[rank] = _Follower(f"rank {rank} of {config.nnodes} ({host})", line)
    logger.info("Rank %d has joined from %s", rank, host)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
    return port
