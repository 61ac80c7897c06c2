"""One of the other API processes: `api_processes.py` starts it.

python -m paged.http.api_process FD
"""

from __future__ import annotations

import socket
import sys

from paged.http.api_processes import Setup
from paged.http.logs import configure_logging
from paged.http.serve import make_app, serve
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.child_process import JoinedProcess
from paged.runtime.config import EngineConfig
from paged.runtime.remote_core import RemoteCore
from paged.runtime.wire import Channel


def main(descriptor: int) -> int:
    """Serve until the first API process says that it is enough; returns the exit status."""
    first = Channel(socket.socket(fileno=descriptor), Setup)
    setup = _receive(first)
    configure_logging(setup.options.uvicorn_log_level)

    def join(config: EngineConfig) -> RemoteCore:
        return RemoteCore(config, process=JoinedProcess(setup.door))

    engine = AsyncEngine.from_config(setup.config, make_core=join)
    try:
        app = make_app(engine, setup.config, setup.options, setup.peers)
        sockets = [socket.socket(fileno=each) for each in (setup.listener, setup.private)]
        return serve(app, sockets, setup.options, first=first)
    finally:
        engine.shutdown()


def _receive(first: Channel) -> Setup:
    messages: list[Setup] = []
    while not messages:
        messages = first.receive(wait=True)
    return messages[0]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
