"""Folders, disks and limits of the machine."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

from paged.runtime.compiles import cache_folder
from paged.runtime.config import EngineConfig
from paged.runtime.doctor.finding import Finding, ok, warning, wrong
from paged.runtime.memory import available_memory, size_text

_GIB = 2**30
# Programs of one model and GPU take some hundred MiB.
_ROOM_FOR_PROGRAMS = _GIB
# Of shared memory, through which GPUs of one machine talk to each other.
_SHARED = _GIB
_FILES, _FEW_FILES, _TOO_FEW_FILES = 65_536, 4096, 256


def check_machine(config: EngineConfig) -> Iterator[Finding]:
    """All of it."""
    yield from _check_cache(config)
    yield from _check_pages_on_disk(config)
    yield from _check_host_memory(config)
    if config.devices_here > 1:
        yield from check_shared_memory(Path("/dev/shm"))
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _check_cache(config: EngineConfig) -> Iterator[Finding]:
    folder = cache_folder(config.compile_cache_dir)
    if folder is None:
        yield warning(
            "compile cache",
            "--compile-cache-dir '' keeps no programs: every start compiles for minutes",
            "Leave it out.",
        )
        return
    yield from check_folder(
        "compile cache", folder, _ROOM_FOR_PROGRAMS, "--compile-cache-dir", fatal=False
    )


def _check_pages_on_disk(config: EngineConfig) -> Iterator[Finding]:
    if config.kv_offloading_dir is not None:
        room = int(config.kv_offloading_dir_size * _GIB)
        folder = Path(config.kv_offloading_dir).expanduser()
        yield from check_folder("pages on disk", folder, room, "--kv-offloading-dir", fatal=True)


def check_folder(
    check: str, folder: Path, room: int, flag: str, *, fatal: bool
) -> Iterator[Finding]:
    """Whether files can be written there, and whether so many bytes find room.

    Args:
        fatal: a start fails without the folder.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with NamedTemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        said = f"{folder} cannot be written: {error.strerror}"
        remedy = f"Make it writable, or name another folder with {flag}."
        yield wrong(check, said, remedy) if fatal else warning(check, said, remedy)
        return
    if free < room:
        yield warning(
            check,
            f"{folder} has {size_text(free)} of disk left, and {size_text(room)} may be wanted",
            f"Make room, or name a folder on another disk with {flag}.",
        )
    else:
        yield ok(check, f"{folder}, {size_text(free)} of disk left")


def _check_host_memory(config: EngineConfig) -> Iterator[Finding]:
    available = available_memory(swap=False)
    if available is None:
        return
    wanted = int((config.kv_offloading_size + config.cpu_offload_gb) * _GIB)
    if wanted > available:
        yield wrong(
            "host memory",
            f"{size_text(available)} are left, and --kv-offloading-size and --cpu-offload-gb want "
            f"{size_text(wanted)}",
            "Lower them.",
        )
    else:
        yield ok("host memory", f"{size_text(available)} are left")


def check_shared_memory(folder: Path) -> Iterator[Finding]:
    """Whether GPUs have room for what they tell each other."""
    size = shutil.disk_usage(folder).total if folder.exists() else 0
    if size < _SHARED:
        yield warning(
            "shared memory",
            f"{folder} has {size_text(size)}: GPUs that share a model may fail to start",
            "Start the container with --ipc=host or --shm-size 8g.",
        )
    else:
        yield ok("shared memory", f"{folder} has {size_text(size)}")


def check_files(most: int) -> Finding:
    """Whether there can be as many connections as clients may want.

    Args:
        most: the hard limit, which a server takes all of.
    """
    if most == resource.RLIM_INFINITY or most >= _FEW_FILES:
        return ok(
            "open files", "without a limit" if most == resource.RLIM_INFINITY else f"{most:,}"
        )
    said = f"{most:,} may be open at once, and each connection is one"
    remedy = f"Raise the limit: `ulimit -Hn {_FILES}`, LimitNOFILE in systemd, --ulimit in Docker."
    return (wrong if most < _TOO_FEW_FILES else warning)("open files", said, remedy)
