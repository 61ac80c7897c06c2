"""Compiled programs kept on disk whole, so that the next start need not even trace them.

JAX's own compilation cache is asked with a program that has been traced and lowered, and for some
hundred programs that alone is most of a start. Here the question is what the program is made from
(see `paged.runtime.kept_files`). Whoever can write to the folder can make the engine run anything,
as with JAX's own cache.

A file is the digest of its name and of what follows, then the program: machine code that was
damaged on its way, or that is another program's, would load and end the process when it is called.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

from paged.runtime.kept_files import keep, load, path_for

_DIGEST_SIZE = hashlib.sha256().digest_size


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


def load_or_compile(
    what: Any, make: Callable[[], Compiled], devices: Sequence[jax.Device] = ()
) -> Compiled:
    """The program that `make` compiles, from disk if it is there, else made and put there.

    Args:
        what: see `path_for`.
        make: compiles it, from a function that was `named_apart`.
        devices: that it runs on; without any, the default device.
    """
    path = path_for(what, "program")
    if path is None:
        return make()
    kept = load(path, partial(_program, path, devices or jax.devices()[:1]))
    return kept if kept is not None else _keep(make(), path)


def named_apart(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function under a name that no other has, for which JAX's own cache has no program.

    What that cache gives is not whole when it is written once more: on a CPU it then lacks its
    functions, which shows when it is called, not when it is loaded.
    """

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = f"paged_{name}_{secrets.token_hex(8)}"
    return named


def _program(path: Path, devices: Sequence[jax.Device], kept: bytes) -> Compiled:
    """The program in a file's content. Raises whatever damage brings about."""
    content = kept[_DIGEST_SIZE:]
    if kept[:_DIGEST_SIZE] != _digest(path, content):
        raise ValueError("it is damaged, or another program's")
    program, inputs, outputs = pickle.loads(content)
    return serialize_executable.deserialize_and_load(
        program, inputs, outputs, execution_devices=devices
    )


def _keep(program: Compiled, path: Path) -> Compiled:
    content = pickle.dumps(serialize_executable.serialize(program))
    keep(path, _digest(path, content) + content)
    return program


def _digest(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()
