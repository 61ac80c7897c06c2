"""Connections over loopback, for tests of how processes of one engine talk."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from paged.runtime.hosts.messages import ToFollower, ToLeader
from paged.runtime.line import Line


@contextmanager
def line_pair() -> Iterator[tuple[Line, Line]]:
    """Rank 0's end, and another rank's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = Line(socket.create_connection(server.getsockname(), 10), ToFollower)
        connection, _ = server.accept()
    leader = Line(connection, ToLeader)
    try:
        yield leader, other
    finally:
        leader.close()
        other.close()
