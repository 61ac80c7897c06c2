"""What device JAX would take, and how much memory that has, asked in a process of its own.

    python -m paged.runtime.device_probe

prints it. A process that has asked holds the device; this one is gone when the answer is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from paged.runtime.errors import ConfigError

MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Where JAX finds the share of a device's memory that it reserves, by either name."""

_MODULE = "paged.runtime.device_probe"
# Seconds; a driver that has gone to sleep takes some.
_TIME_TO_ANSWER = 120


class DeviceMemory(msgspec.Struct, frozen=True):
    """A device before anything is loaded.

    Attributes:
        platform: "cpu", "gpu", ...
        kind: what its maker calls it.
        total: bytes, of which a share is taken; None where the device does not say.
    """

    platform: str
    kind: str
    total: int | None


def probe_device() -> DeviceMemory:
    """The device that an engine process would get. Raises ConfigError if JAX finds none."""
    # JAX counts what it may use: let it be all, and take none of it.
    settings = {MEMORY_FRACTIONS[0]: "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    path = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", _MODULE],
            env={**os.environ, "PYTHONPATH": path, **settings},
            capture_output=True,
            timeout=_TIME_TO_ANSWER,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"JAX finds no device within {_TIME_TO_ANSWER} s") from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"JAX finds no device: {''.join(last)}")
    return msgspec.json.decode(done.stdout, type=DeviceMemory)


def _look() -> DeviceMemory:
    import jax

    device = jax.devices()[0]
    total = (device.memory_stats() or {}).get("bytes_limit")
    return DeviceMemory(device.platform, device.device_kind, total)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_look()))
