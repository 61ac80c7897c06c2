"""Compiled programs kept on disk whole, so that the next start need not even trace them.

JAX's own compilation cache is asked with a program that has been traced and lowered, and for some
hundred programs that alone is most of a start. Here the question is what the program is made from:
this package's source, the versions and flags of the compiler, the device, and the shapes. Whoever
can write to the folder can make the engine run anything, as with JAX's own cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

logger = logging.getLogger(__name__)

Loader = Callable[[], Compiled]


def load_or_compile(what: Any, make: Loader) -> Compiled:
    """The program that `make` compiles, from disk if it is there, else made and put there.

    Args:
        what: all that makes the program this one beside source, compiler and device; its `repr`
            must tell it from every other.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder is None:
        return make()
    name = hashlib.sha256(f"{_environment()}\n{what!r}".encode()).hexdigest()
    path = Path(folder) / f"{name}.program"
    return _load(path) or _keep(make(), path)


def _load(path: Path) -> Compiled | None:
    """The program kept there; None where there is none that loads."""
    if not path.exists():
        return None
    try:
        return serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
    except Exception as error:  # whatever a damaged file brings about: it is made anew
        logger.warning("%s does not load and is compiled again: %s", path, error)
        return None


def _keep(program: Compiled, path: Path) -> Compiled:
    """Write the program, whole or not at all; a disk that is full costs only the next start."""
    try:
        content = pickle.dumps(serialize_executable.serialize(program))
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("%s was not kept for the next start: %s", path, error)
    return program


@cache
def _environment() -> str:
    """What a program depends on beside its shapes."""
    device = jax.devices()[0]
    return "\n".join(
        (
            _source(),
            f"jax {jax.__version__}, jaxlib {version('jaxlib')}",
            device.client.platform_version,
            f"{device.device_kind} {getattr(device, 'compute_capability', '')}",
            _host() if device.platform == "cpu" else "",
            os.environ.get("XLA_FLAGS", ""),
            str(sorted(item for item in jax.config.values.items() if "cache" not in item[0])),
        )
    )


def _host() -> str:
    """What this machine's processor is able to do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith("flags")), platform.processor())


def _source() -> str:
    """Digest of every module of this package."""
    digest = hashlib.sha256()
    for folder, _, names in sorted(os.walk(Path(__file__).parents[1], followlinks=True)):
        for name in sorted(names):
            if name.endswith(".py"):
                digest.update(f"{folder}/{name}\n".encode())
                digest.update((Path(folder) / name).read_bytes())
    return digest.hexdigest()
