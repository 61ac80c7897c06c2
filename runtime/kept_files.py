"""Files that a start leaves to the next one: compiled programs, and what was measured for them.

Each is found by what it is made from: this package's source, the versions and flags of the
compiler, the device, and what else the caller says. They live in the folder of JAX's own cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import jax

logger = logging.getLogger(__name__)

Kind = Literal["program", "tilings"]
"""Ending of a file's name."""

_SECONDS_UNUSED = 30 * 24 * 3600


def path_for(what: Any, kind: Kind) -> Path | None:
    """Where something is kept that is made from this source, by this compiler, for this device.

    Args:
        what: all that makes it this one, beside those; its `repr` must tell it from every other.

    Returns:
        The file, whether there is one yet or not; None without a folder.
    """
    folder = jax.config.jax_compilation_cache_dir
    name = hashlib.sha256(f"{_environment()}\n{what!r}".encode()).hexdigest()
    return None if folder is None else Path(folder) / f"{name}.{kind}"


def load[T](path: Path, read: Callable[[bytes], T]) -> T | None:
    """What `read` makes of a file; None where there is none, or none that it can read.

    Args:
        read: may raise anything that a damaged file brings about.
    """
    try:
        loaded = read(path.read_bytes())
        with suppress(OSError):  # a folder that may only be read
            path.touch()
        return loaded
    except FileNotFoundError:
        return None
    except Exception as error:
        logger.warning("%s does not load and is made anew: %s", path, error)
        return None


def keep(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all; a disk that is full costs only the next start."""
    unfinished = path.with_suffix(f".{secrets.token_hex(8)}")
    try:
        try:
            unfinished.write_bytes(content)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        _tidy(path.parent)
    except OSError as error:
        logger.warning("%s was not kept for the next start: %s", path, error)


def _tidy(folder: Path) -> None:
    """Forget what nobody has used for long."""
    for kept in (path for kind in get_args(Kind) for path in folder.glob(f"*.{kind}")):
        with suppress(FileNotFoundError):  # another process tidies too
            if time.time() - kept.stat().st_mtime > _SECONDS_UNUSED:
                kept.unlink()


def _environment() -> str:
    """What a program depends on beside its shapes."""
    configured = sorted(item for item in jax.config.values.items() if "cache" not in item[0])
    return f"{_process()}\n{configured}"


@cache
def _process() -> str:
    """The part of it that is settled when a process starts."""
    device = jax.devices()[0]
    return "\n".join(
        (
            source_digest(),
            f"jax {jax.__version__}, jaxlib {version('jaxlib')}",
            device.client.platform_version,
            f"process {jax.process_index()} of {jax.process_count()}",
            f"{device.device_kind} {getattr(device, 'compute_capability', '')}",
            _host() if device.platform == "cpu" else "",
            os.environ.get("XLA_FLAGS", ""),
        )
    )


def _host() -> str:
    """What this machine's processor is able to do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith("flags")), platform.processor())


@cache
def source_digest() -> str:
    """Digest of every module of this package, wherever it is installed."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for folder, _, names in sorted(os.walk(root, followlinks=True)):
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder) / name
                digest.update(f"{path.relative_to(root)}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
