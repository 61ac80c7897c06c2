"""A Ray cluster of its own on this machine, for applications of two small replicas."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.ray.serving import Cluster

# Before Ray is imported, which the tests do when they are called.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # nor any other: all of it on the loopback address
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    os.environ.update(_ENVIRONMENT)
    # A short name: those of Ray's sockets have little room behind it.
    folder = TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
    with folder as path, Cluster.running(Path(path)) as cluster:
        yield cluster
