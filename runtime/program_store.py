"""Compiled programs kept on disk whole, so that the next start need not even trace them.

JAX's own compilation cache is asked with a program that has been traced and lowered, and for some
hundred programs that alone is most of a start. Here the question is what the program is made from:
this package's source, the versions and flags of the compiler, the device, and the shapes. Whoever
can write to the folder can make the engine run anything, as with JAX's own cache.

A file is the digest of its name and of what follows, then the program: machine code that was
damaged on its way, or that is another program's, would load and end the process when it is called.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

logger = logging.getLogger(__name__)

KINDS = ("program", "tilings")
"""Endings of the files that are kept, all for as long as they are in use."""

_DIGEST_SIZE = hashlib.sha256().digest_size
_SECONDS_UNUSED = 30 * 24 * 3600


@contextmanager
def kept_once() -> Iterator[None]:
    """Here JAX's own cache takes nothing. It would write every program once more, and Python, which
    lowers the next ones, stands still while a program is made into bytes.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def load_or_compile(what: Any, make: Callable[[], Compiled]) -> Compiled:
    """The program that `make` compiles, from disk if it is there, else made and put there.

    Args:
        what: all that makes the program this one beside source, compiler and device; its `repr`
            must tell it from every other.
        make: compiles it, from a function that was `named_apart`.
    """
    path = path_for(what, "program")
    return make() if path is None else _load(path) or _keep(make(), path)


def path_for(what: Any, kind: str) -> Path | None:
    """Where that is kept which is made from this source, by this compiler, for this device.

    Args:
        what: see `load_or_compile`.
        kind: one of `KINDS`.

    Returns:
        The file, whether there is one yet or not; None without a folder.
    """
    folder = jax.config.jax_compilation_cache_dir
    name = hashlib.sha256(f"{_environment()}\n{what!r}".encode()).hexdigest()
    return None if folder is None else Path(folder) / f"{name}.{kind}"


def named_apart(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function under a name that no other has, for which JAX's own cache has no program.

    What that cache gives is not whole when it is written once more: on a CPU it then lacks its
    functions, which shows when it is called, not when it is loaded.
    """

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = f"paged_{name}_{secrets.token_hex(8)}"
    return named


def _load(path: Path) -> Compiled | None:
    """The program kept there; None where there is none that loads."""
    try:
        kept = path.read_bytes()
        content = kept[_DIGEST_SIZE:]
        if kept[:_DIGEST_SIZE] != _digest(path, content):
            raise ValueError("it is damaged, or another program's")
        program = serialize_executable.deserialize_and_load(*pickle.loads(content))
        with suppress(OSError):  # a folder that may only be read
            path.touch()
        return program
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a damaged file brings about: it is made anew
        logger.warning("%s does not load and is compiled again: %s", path, error)
        return None


def _keep(program: Compiled, path: Path) -> Compiled:
    content = pickle.dumps(serialize_executable.serialize(program))
    keep(path, _digest(path, content) + content)
    return program


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
    for kept in (path for kind in KINDS for path in folder.glob(f"*.{kind}")):
        with suppress(FileNotFoundError):  # another process tidies too
            if time.time() - kept.stat().st_mtime > _SECONDS_UNUSED:
                kept.unlink()


def _digest(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


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
            _source(),
            f"jax {jax.__version__}, jaxlib {version('jaxlib')}",
            device.client.platform_version,
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


def _source() -> str:
    """Digest of every module of this package."""
    digest = hashlib.sha256()
    for folder, _, names in sorted(os.walk(Path(__file__).parents[1], followlinks=True)):
        for name in sorted(names):
            if name.endswith(".py"):
                digest.update(f"{folder}/{name}\n".encode())
                digest.update((Path(folder) / name).read_bytes())
    return digest.hexdigest()
