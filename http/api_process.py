"""One of the other API processes: `api_processes.py` starts it.

python -m paged.http.api_process FD
"""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack

from paged.http.api_processes import Setup
from paged.http.logs import configure_logging
from paged.http.serve import leave, make_app, serve
from paged.http.server import Opened
from paged.http.start import joined
from paged.runtime.wire import Channel


def main(descriptor: int) -> int:
    """Serve until the first API process says that it is enough; returns the exit status."""
    first = Channel(socket.socket(fileno=descriptor), Setup)
    setup = _receive(first)
    options = setup.options
    configure_logging(options.uvicorn_log_level, options.log_format)
    listener, private = (socket.socket(fileno=each) for each in (setup.listener, setup.private))

    def load(stack: ExitStack) -> Opened:
        services = stack.enter_context(joined(setup.entries, options, setup.doors))
        return Opened(make_app(services, options, setup.peers), private)

    return leave(serve(load, listener, options, first))


def _receive(first: Channel) -> Setup:
    messages: list[Setup] = []
    while not messages:
        messages = first.receive(wait=True)
    return messages[0]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
