"""Where compilations are kept, and how many there were, to prove that serving causes none."""

from __future__ import annotations

from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from paged.runtime.errors import ConfigError

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == _EVENT:
        _count += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


def num_compiles() -> int:
    """Programs that JAX has compiled, or fetched from its cache, in this process so far."""
    return _count


def cache_folder(folder: str | None) -> Path | None:
    """Where --compile-cache-dir keeps compiled programs; None for nowhere."""
    if folder == "":
        return None
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "paged" / "jit"


def use_compile_cache(folder: str | None) -> None:
    """Keep compiled programs on disk; None is ~/.cache/paged/jit, "" keeps none.

    Raises:
        ConfigError: there can be no such folder.
    """
    compilation_cache.reset_cache()  # else JAX's own part stays in the first folder of a process
    path = cache_folder(folder)
    if path is None:
        jax.config.update("jax_compilation_cache_dir", None)
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--compile-cache-dir {path}: {error.strerror}") from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
