"""The process of a rank above 0: it loads what rank 0 loads, and calls what rank 0 calls.

    python -m paged.runtime.hosts.follower FD

`paged.runtime.hosts.headless` starts it with the descriptor of a connected socket, at which it is
told what to load. It ends with whoever started it, and with rank 0, however that ends.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress

from paged.models.loading import ModelSource
from paged.runtime.child_process import PEER_LOST
from paged.runtime.config import EngineConfig
from paged.runtime.engine import find_model
from paged.runtime.engine_process import serve_model
from paged.runtime.errors import ConfigError, EngineDead
from paged.runtime.hosts.handshake import facts_of, introduce
from paged.runtime.hosts.messages import Begin, Call, Failing, Following, ToFollower
from paged.runtime.line import Line
from paged.runtime.step_device import Device
from paged.runtime.wire import Channel, Joined, Start

logger = logging.getLogger(__name__)

_BETWEEN_TRIES = 1.0
_TIME_TO_CONNECT = 5.0
# Seconds that this process gets to leave by itself when rank 0 has hung up.
_LAST_WORDS = 2.0


def main(descriptor: int) -> int:
    """Follow rank 0 as the first message says; returns the exit status."""
    return serve_model(descriptor, _load, _serve, Start)


def _load(start: Start) -> tuple[Device, Line]:
    config = start.config
    source = find_model(config)
    line = _join(config, facts_of(config, source))
    try:
        device = _prepared(config, source, line)
    except Exception as error:
        with suppress(OSError):
            line.send(Failing(str(error) or type(error).__name__))
        raise
    gc.freeze()  # what start-up made lives as long as this process
    line.send(Following())
    return device, line


def _serve(loaded: tuple[Device, Line], channel: Channel) -> None:
    channel.send(Joined())
    follow(*loaded)


def follow(device: Device, line: Line) -> None:
    """Make the calls that rank 0 makes, until it says that it is over.

    Raises:
        EngineDead: it is gone.
    """
    from paged.runtime.hosts.cluster import end
    from paged.runtime.programs import call_keys

    keys = call_keys(device.shapes)
    try:
        while isinstance(message := line.receive(), Call):
            device.call(keys[message.program], *(each.array() for each in message.inputs))
    except EOFError:
        raise EngineDead("rank 0 is gone") from None
    device.close()
    end()


def _join(config: EngineConfig, facts: dict[str, str]) -> Line:
    """A line to rank 0, which may not be there yet, when all are there that it waits for.

    Raises:
        ConfigError: it does not take this process.
    """
    address = config.master_addr, config.master_port
    logger.info("Waiting for rank 0 at %s:%d", *address)
    while True:
        try:
            return _introduced(address, config.node_rank, facts)
        except ConfigError:
            raise
        except (OSError, EOFError, ValueError):
            time.sleep(_BETWEEN_TRIES)


def _introduced(address: tuple[str, int], rank: int, facts: dict[str, str]) -> Line:
    """A line to rank 0. Raises as `introduce`, and OSError if there is nobody."""
    line = Line(socket.create_connection(address, _TIME_TO_CONNECT), ToFollower)
    try:
        introduce(line, rank, facts)
    except BaseException:
        line.close()
        raise
    return line


def _prepared(config: EngineConfig, source: ModelSource, line: Line) -> Device:
    """The model, loaded and compiled, once all other ranks are there."""
    from paged.runtime.about import StartClock
    from paged.runtime.hosts.cluster import begin
    from paged.runtime.setup import prepare_device

    try:
        message = line.receive()
    except EOFError:
        raise EngineDead("rank 0 is gone, which waited for others") from None
    assert isinstance(message, Begin), "rank 0 says when to begin"
    threading.Thread(target=_leave_with_leader, args=(line.fileno(),), daemon=True).start()
    begin(message.coordinator, config.nnodes, config.node_rank)
    device, _ = prepare_device(config, source, StartClock(), progress=False)
    return device


def _leave_with_leader(descriptor: int) -> None:
    """End this process after rank 0, also in the middle of a step that waits for it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    time.sleep(_LAST_WORDS)
    os._exit(PEER_LOST)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
