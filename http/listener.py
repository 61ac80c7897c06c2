"""The socket that `paged serve` listens on, and what is said of where it is."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

from paged.http.options import ServeOptions
from paged.runtime.errors import ConfigError

# Addresses that stand for all of a machine's, and the one by which it finds itself there.
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@contextlib.contextmanager
def bound(options: ServeOptions) -> Iterator[socket.socket]:
    """A socket that does not listen yet; a Unix socket's path goes with it."""
    if options.uds is None:
        with _bind(options.host, options.port) as listener:
            if options.api_server_count > 1:
                # Only now: a port that somebody else has would have been shared with them.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            yield listener
        return
    path = Path(options.uds)
    with _bind_path(path) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def where(listener: socket.socket, options: ServeOptions) -> str:
    """Where clients find the server, and a remark if more can reach it than the address says."""
    scheme = "https" if options.ssl_certfile else "http"
    if options.uds is not None:
        return f"{scheme}://localhost/v1 (on the Unix socket {options.uds})"
    host, port = listener.getsockname()[:2]
    local = _EVERY_INTERFACE.get(host, host)
    address = f"[{local}]:{port}" if ":" in local else f"{local}:{port}"
    return f"{scheme}://{address}/v1{_who_else(host, has_keys=bool(options.api_key))}"


def _who_else(host: str, *, has_keys: bool) -> str:
    if host not in _EVERY_INTERFACE:
        return ""
    if has_keys:
        return " (on every interface)"
    return " (on every interface, no API key; --host 127.0.0.1 for this machine only)"


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        advice = ": it is taken, use another --port" if taken else f": {error}"
        raise ConfigError(f"Cannot listen on {host} port {port}{advice}") from error
    return listener


def _bind_path(path: Path) -> socket.socket:
    """A Unix socket in place of one that a server has left behind, but of nothing else."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_alive(path):
            path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on --uds {path}: {error.strerror or error}") from error
    return listener


def _is_alive(path: Path) -> bool:
    """Whether someone listens there, as a server does from its start on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(str(path)) == 0
