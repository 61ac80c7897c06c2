"""The engine process: an engine core and its loop, at the other end of sockets.

    python -m paged.runtime.engine_process FD

`paged.runtime.remote_core` starts it with the descriptor of a connected socket. It sleeps in its
sockets while there is no work, looks into them between steps, and ends with the process that
started it, however that ends.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from paged.models.reports import reports_to
from paged.runtime.clients import Client, Clients
from paged.runtime.config import EngineConfig
from paged.runtime.engine import LoadedCore, find_model
from paged.runtime.errors import EngineDead
from paged.runtime.logs import log_to_stderr
from paged.runtime.messages import Saving
from paged.runtime.wire import (
    Abort,
    Add,
    Channel,
    Closing,
    Failed,
    Loading,
    Look,
    Looked,
    Ready,
    ResetPrefixCache,
    Start,
    ToEngine,
    WasReset,
)

if TYPE_CHECKING:
    from paged.models.loading import ModelSource
    from paged.runtime.step_device import Device

logger = logging.getLogger(__name__)


class ServedCore(LoadedCore, Protocol):
    """A core that an engine process serves."""

    def closing(self) -> Iterable[Saving]:
        """Close, and say meanwhile how far pages have been written to disk."""
        ...


def main(descriptor: int, make_core: Callable[[EngineConfig], ServedCore]) -> int:
    """Make a core as the first message says and serve it; returns the exit status."""

    def load(start: Start) -> tuple[ServedCore, socket.socket | None]:
        door = None if start.door is None else socket.socket(fileno=start.door)
        return make_core(start.config), door

    def serve(loaded: tuple[ServedCore, socket.socket | None], channel: Channel) -> None:
        core, door = loaded
        _serve(core, Clients(channel, door, core.fileno()))

    return serve_model(descriptor, load, serve)


def serve_model[T](
    descriptor: int,
    load: Callable[[Start], T],
    serve: Callable[[T, Channel], None],
    incoming: Any = ToEngine,
) -> int:
    """Load what the first message says and serve it; returns the exit status.

    Args:
        descriptor: of a connected socket.
        load: makes a core, or whatever is served.
        serve: returns when the other side closes.
        incoming: union of the messages that come.
    """
    threading.Thread(target=_leave_with_peer, args=(descriptor,), daemon=True).start()
    channel = Channel(socket.socket(fileno=descriptor), incoming)
    try:
        start = _receive_start(channel)
        how = start.log_format
        log_to_stderr(start.log_level, "paged", about=start.about, log_format=how)
        with reports_to(lambda news: channel.send(Loading(*news))):
            loaded = load(start)
        serve(loaded, channel)
    except Exception as error:
        channel.send(_last_words(error))
        channel.flush()
        return 1
    return 0


def _leave_with_peer(descriptor: int) -> None:
    """End this process when the other one has ended, also in the middle of loading or a step."""
    poll = select.poll()
    poll.register(descriptor, 0)  # the hang-up is reported in any case
    poll.poll()
    os._exit(1)


def _receive_start(channel: Channel) -> Start:
    messages: list[Start] = []
    while not messages:
        messages = channel.receive(wait=True)
    return messages[0]


def _serve(core: ServedCore, clients: Clients) -> None:
    """Step until the first client leaves. Raises EngineDead when the core dies."""
    facts = (core.max_model_len, core.vocab_size, core.memory)
    ready = Ready(*facts, core.stats(), core.startup)
    clients.first.channel.send(ready)
    while True:
        was_idle = not core.has_work
        for client in clients.heard(wait=was_idle):
            try:
                messages = client.channel.receive(wait=False)
            except EOFError:
                for request_id in clients.leave(client):
                    core.abort(request_id)
                if client is clients.first:
                    for saving in core.closing():
                        client.channel.send(Closing(saving.seconds_left))
                    return
                continue
            for message in messages:
                if isinstance(message, Start):
                    client.channel.send(ready)
                else:
                    _take(core, clients, client, message)
        if was_idle and core.has_work and (clients.are_several or clients.bell is not None):
            # The first is to know that a step is waited for, if only by somebody else.
            clients.tell([], core.stats(), everybody=True)
        outputs = core.step() if core.has_work else []
        clients.tell(outputs, core.stats(), everybody=not core.has_work)


def _take(
    core: LoadedCore,
    clients: Clients,
    client: Client,
    message: Add | Abort | ResetPrefixCache | Look,
) -> None:
    client.num_taken += 1
    match message:
        case Add(request=request):
            core.add(request)
            clients.own(client, request)
        case Abort(request_id=request_id, index=index):
            core.abort(request_id, index)  # who asked knows how it ends
            clients.forget(request_id, index)
        case ResetPrefixCache():
            client.channel.send(WasReset(core.reset_prefix_cache()))
        case Look():
            core.look(lambda state: client.channel.send(Looked(state)))


def _last_words(error: Exception) -> Failed:
    """Paged's own errors as they are; any other is a bug, and its trace goes to the log."""
    if type(error).__module__.startswith("paged."):
        return Failed.of(error)
    logger.exception("The engine process failed")
    return Failed.of(EngineDead(f"the engine stopped: {type(error).__name__}: {error}"))


def load_core(config: EngineConfig) -> ServedCore:
    """The core of a model, loaded and compiled."""
    # Here, so that the watcher runs before the seconds that importing JAX takes.
    from paged.runtime.core import EngineCore

    source = find_model(config)
    core = EngineCore(config, source, _lead(config, source))
    gc.freeze()  # what start-up made lives as long as this process
    return core


def _lead(config: EngineConfig, source: ModelSource) -> Callable[[Device], Device]:
    """What has others follow a device, when all processes that share the model are there."""
    from paged.runtime.step_device import alone

    if config.nnodes == 1:
        return alone
    from paged.runtime.hosts.leader import LeadingDevice, gather

    return partial(LeadingDevice, followers=gather(config, source))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), load_core))
